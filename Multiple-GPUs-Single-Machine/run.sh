#!/usr/bin/env bash
# Trains on several GPUs of this machine in one process, a tower on each. `bash run.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/multiple_gpus.py" "$@"
