#!/usr/bin/env bash
# Trains by a scheme with virtual workers: bash run.sh HogWild --num_workers=1000. `bash run.sh HogWild --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/simulate.py" "$@"
