#!/usr/bin/env bash
# How many workers each scheme bears, in the simulator: bash benchmarks/workers.sh --help
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/workers.py" "$@"
