#!/usr/bin/env bash
# Trains on several machines, reached by ssh: bash Multiple-Machines/start.sh HOSTS_FILE SCHEME [flags of the scheme]
# More workers for a run with --max_workers: bash Multiple-Machines/start.sh --join=HOSTS_FILE RUN
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/start.py" "$@"
