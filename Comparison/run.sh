#!/usr/bin/env bash
# Every scheme until the same accuracy under five conditions, in the simulator: bash Comparison/run.sh --help
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/comparison.py" "$@"
