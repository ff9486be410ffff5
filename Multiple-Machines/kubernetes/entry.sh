#!/usr/bin/env bash
# What a container runs: one task of a cluster, which TF_CONFIG names.
#
#     entry.sh SCHEME --run_dir=FOLDER [the scheme's other flags]
#
# The chief may be a second one, in place of a pod that was killed: where there is a checkpoint, it goes on from that.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
scheme=$1 run_dir=${2#--run_dir=}
shift
compgen -G "$run_dir/checkpoints/*.index" >/dev/null && set -- "$@" --resume
exec bash "$root/$scheme/run.sh" "$@"
