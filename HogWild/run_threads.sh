#!/usr/bin/env bash
# Trains with HogWild in the paper's own setting: threads of one process. `bash run_threads.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/hogwild_threads.py" "$@"
