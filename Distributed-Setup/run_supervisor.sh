#!/usr/bin/env bash
# Trains with one ps and one worker, in a session of the older Supervisor. `bash run_supervisor.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/distributed_setup_supervisor.py" --launch "$@"
