#!/usr/bin/env bash
# Schemes over slow links until they have the same loss, on hosts made on this machine; needs root: bash Slow-Links/run.sh --help
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/until_loss.py" "$@"
