#!/usr/bin/env bash
# Measures tables on the ps, beside TensorFlow's own and by their size. `bash benchmarks/tables.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/tables.py" "$@"
