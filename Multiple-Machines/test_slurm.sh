#!/usr/bin/env bash
# Trains under a real Slurm of three nodes on this machine: HogWild and SAGN, scancel and resume, and more (tests/test_slurm.py).
# Needs root, and Debian's slurm-wlm: apt-get install slurm-wlm
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
export TESTS_MAY_SKIP=no
cd "$here/.." && exec "$PYTHON" -m pytest tests/test_slurm.py -v "$@"
