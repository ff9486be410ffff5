#!/usr/bin/env bash
# Trains with Synchronous-SGD: ps and workers as processes on this machine. `bash run.sh --help` lists the flags.
#
#     bash run.sh                                  # through the ps: synchronous_sgd.py
#     bash run.sh --by=all_reduce                  # among the workers: all_reduce.py
#     bash run.sh --by=sync_replicas_optimizer     # with TensorFlow's optimizer: sync_replicas_optimizer.py
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
by=synchronous_sgd flags=()
for flag in "$@"; do
    case $flag in
    --by=*) by=${flag#--by=} ;;
    *) flags+=("$flag") ;;
    esac
done
case $by in
synchronous_sgd | all_reduce | sync_replicas_optimizer) ;;
*)
    echo "run.sh: --by must be synchronous_sgd, all_reduce or sync_replicas_optimizer, not '$by'" >&2
    exit 2
    ;;
esac
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/$by.py" --launch ${flags[@]+"${flags[@]}"}
