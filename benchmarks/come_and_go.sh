#!/usr/bin/env bash
# Workers join a run and leave it while others train: how fast it is, and whether anybody waits. --help lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/come_and_go.py" "$@"
