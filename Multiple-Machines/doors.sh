#!/usr/bin/env bash
# What start.sh runs on a host: see doors.py.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/doors.py" "$@"
