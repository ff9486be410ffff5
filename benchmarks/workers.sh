#!/usr/bin/env bash
# How many workers each scheme can use, in the simulator: bash benchmarks/workers.sh --help
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/workers.py" "$@"
