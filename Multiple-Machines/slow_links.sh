#!/usr/bin/env bash
# How schemes fare over slow links, on hosts made on this machine; needs root: bash Multiple-Machines/slow_links.sh --help
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/slow_links.py" "$@"
