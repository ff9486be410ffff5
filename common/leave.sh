#!/usr/bin/env bash
# Asks workers of a run started with --max_workers to leave: `bash common/leave.sh FOLDER [COUNT]`.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/setup.sh"
exec "$PYTHON" "$here/launch/control.py" leave "$@"
