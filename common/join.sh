#!/usr/bin/env bash
# Adds workers to a run started with --max_workers: `bash common/join.sh FOLDER [COUNT]`.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/setup.sh"
exec "$PYTHON" "$here/launch/control.py" join "$@"
