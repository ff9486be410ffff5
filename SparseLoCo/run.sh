#!/usr/bin/env bash
# Trains with SparseLoCo: ps and workers as processes on this machine. `bash run.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/sparseloco.py" --launch "$@"
