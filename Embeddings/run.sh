#!/usr/bin/env bash
# Trains the recommender with a scheme of this collection, then compares its AUC with the best: `bash run.sh [--scheme=NAME] [flags]`.
# The other flags are those of the scheme's own run.sh: `bash run.sh --scheme=DOWNPOUR --help` lists them.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"

scheme=HogWild
source "$here/../common/which_scheme.sh"

# Found by trying, see README.md. A flag that is given comes later, and so counts.
flags=(--epochs=2 --batch_size=512 --learning_rate=0.1 --table_optimizer=rowwise_adagrad --table_learning_rate=0.5)
case $scheme in
    AGN | DOWNPOUR | DOWNPOUR-Easy | Dynamic-SGD | HogWild) flags+=(--window=10) ;;
esac
problem=("--data=$here/ratings.py:load" "--model=$here/recommender.py:build" "--run_dir=$run_dir")
LAUNCHER_PID=$$ bash "$here/../$scheme/run.sh" "${problem[@]}" "${flags[@]}" "${given[@]}" || exit # it ends with this shell
[[ ! -f $run_dir/result.json ]] || exec "$PYTHON" "$here/below_best.py" "$run_dir" # none after --help
