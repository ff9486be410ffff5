#!/usr/bin/env bash
# Measures how the cost grows with workers, ps tasks, window and model. `bash benchmarks/scaling.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/scaling.py" "$@"
