#!/usr/bin/env bash
# Measures what closed doors cost, as root; see doors_cost.py.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/doors_cost.py" "$@"
