#!/usr/bin/env bash
# Trains in one process, with nothing distributed. `bash run.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/non_distributed_setup.py" "$@"
