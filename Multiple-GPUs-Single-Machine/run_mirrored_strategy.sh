#!/usr/bin/env bash
# Trains on several GPUs of this machine with TensorFlow's MirroredStrategy. `bash run_mirrored_strategy.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/mirrored_strategy.py" "$@"
