#!/usr/bin/env bash
# Trains the recommender with a scheme of this collection, then compares its AUC with the best: `bash run.sh [--scheme=NAME] [flags]`.
# The other flags are those of the scheme's own run.sh: `bash run.sh --scheme=DOWNPOUR --help` lists them.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"

scheme=HogWild run_dir=runs/Embeddings/$(date +%Y-%m-%d_%H-%M-%S) previous='' given=()
for argument in "$@"; do
    [[ $previous =~ ^--?run_dir$ ]] && run_dir=$argument
    [[ $argument =~ ^--?run_dir=(.*) ]] && run_dir=${BASH_REMATCH[1]}
    if [[ $argument =~ ^--?scheme=(.*) ]]; then scheme=${BASH_REMATCH[1]}; else given+=("$argument"); fi
    previous=$argument
done
if ! grep -qs "^exec .* --launch" "$here/../$scheme/run.sh"; then
    echo "run.sh: there is no scheme '$scheme'; the folders of the README's first table are schemes, as --scheme=DOWNPOUR" >&2
    exit 2
fi

# Found by trying, see README.md. A flag that is given comes later, and so counts.
flags=(--epochs=2 --batch_size=512 --learning_rate=0.1 --table_optimizer=rowwise_adagrad --table_learning_rate=0.5)
case $scheme in
    AGN | DOWNPOUR | DOWNPOUR-Easy | Dynamic-SGD | HogWild) flags+=(--window=10) ;;
esac
problem=("--data=$here/ratings.py:load" "--model=$here/recommender.py:build" "--run_dir=$run_dir")
LAUNCHER_PID=$$ bash "$here/../$scheme/run.sh" "${problem[@]}" "${flags[@]}" "${given[@]}" || exit # it ends with this shell
[[ ! -f $run_dir/result.json ]] || exec "$PYTHON" "$here/below_best.py" "$run_dir" # none after --help
