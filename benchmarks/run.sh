#!/usr/bin/env bash
# Measures every scheme, and what one would pick instead, in one run. `bash benchmarks/run.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/run.py" "$@"
