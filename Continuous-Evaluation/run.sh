#!/usr/bin/env bash
# Trains with HogWild and evaluates each checkpoint: ps, workers and an evaluator as processes on this machine.
# `bash run.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/continuous_evaluation.py" --launch "$@"
