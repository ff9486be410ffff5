#!/usr/bin/env bash
# Runs the script as a cluster on this machine: a ps and two workers, unless --num_ps and --num_workers say otherwise.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/../common/run.py" "$@" "$here/distributed_session.py"
