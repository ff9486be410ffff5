#!/usr/bin/env bash
# Trains the language model with a scheme of this collection, then lets it write: `bash run.sh [--scheme=NAME] [flags]`.
# The other flags are those of the scheme's own run.sh: `bash run.sh --scheme=DOWNPOUR --help` lists them.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"

scheme=DiLoCo
source "$here/../common/which_scheme.sh"

# Found by trying, see README.md. A flag that is given comes later, and so counts.
flags=(--epochs=6 --batch_size=8 --learning_rate_schedule=cosine --warmup_steps=20 --rounds_per_call=1)
case $scheme in
    DiLoCo | Asynchronous-DiLoCo | Streaming-DiLoCo)
        flags+=(--window=5 --local_learning_rate=0.003 --learning_rate=1 --momentum=0)
        ;;
    AEASGD) flags+=(--window=10 --local_optimizer=adam --learning_rate=0.005) ;;
    SAGN) flags+=(--window=1 --learning_rate=0.003 --warmup_steps=100) ;;
    DOWNPOUR) flags+=(--window=10 --learning_rate=0.05) ;;
    # These were tried with --model=transformer, see there.
    AEAMSGD) flags+=(--window=10 --learning_rate=0.1 --warmup_steps=50) ;;
    AGN) flags+=(--window=5 --learning_rate=2 --warmup_steps=50) ;;
    DC-ASGD) flags+=(--learning_rate=0.3 --warmup_steps=50) ;;
    DOWNPOUR-Easy) flags+=(--window=5 --learning_rate=0.1 --warmup_steps=50) ;;
    Dynamic-SGD | Synchronous-SGD) flags+=(--learning_rate=1 --warmup_steps=50) ;;
    HogWild | Ringmaster-ASGD | Semi-Synchronous-SGD) flags+=(--learning_rate=0.5 --warmup_steps=50) ;;
    SparseLoCo) flags+=(--window=10 --local_learning_rate=0.006 --top=256 --warmup_steps=10) ;;
    Local-SGD) flags+=(--window=10 --learning_rate=1) ;;
    Synchronous-SGD-different-learning-rates) flags+=(--learning_rates=0.7,0.3 --warmup_steps=50) ;;
esac
problem=(--data=text "--model=$here/language_model.py:build" "--run_dir=$run_dir")
LAUNCHER_PID=$$ bash "$here/../$scheme/run.sh" "${problem[@]}" "${flags[@]}" "${given[@]}" || exit # it ends with this shell
[[ ! -f $run_dir/model.keras ]] || exec "$PYTHON" "$here/write.py" "$run_dir/model.keras" # none after --help
