#!/usr/bin/env bash
# Runs the tasks of one node that SkyPilot has rented: bash Multiple-Machines/skypilot.sh SCHEME --run_dir=FOLDER [flags]
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/skypilot.py" "$@"
