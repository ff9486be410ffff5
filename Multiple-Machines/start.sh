#!/usr/bin/env bash
# Trains on several machines, reached by ssh: bash Multiple-Machines/start.sh HOSTS_FILE SCHEME [flags of the scheme]
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/start.py" "$@"
