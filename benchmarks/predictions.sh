#!/usr/bin/env bash
# How well the simulator predicts real runs, on hosts made on this machine; needs root: bash benchmarks/predictions.sh --help
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/predictions.py" "$@"
