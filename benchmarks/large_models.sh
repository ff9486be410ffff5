#!/usr/bin/env bash
# Large models, whose messages cost more than their latency, beside the alternatives: bash benchmarks/large_models.sh --help
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/large_models.py" "$@"
