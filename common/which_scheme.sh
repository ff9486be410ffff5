# Sourced by the run.sh of a problem that any scheme can train, after it has set `here`, its folder, and `scheme`, the default.
# Reads --scheme and --run_dir from the arguments; sets `scheme`, `run_dir`, and `given`, the arguments without --scheme.
run_dir=runs/$(basename "$here")/$(date +%Y-%m-%d_%H-%M-%S) previous='' given=()
for argument in "$@"; do
    [[ $previous =~ ^--?run_dir$ ]] && run_dir=$argument
    [[ $argument =~ ^--?run_dir=(.*) ]] && run_dir=${BASH_REMATCH[1]}
    if [[ $argument =~ ^--?scheme=(.*) ]]; then scheme=${BASH_REMATCH[1]}; else given+=("$argument"); fi
    previous=$argument
done
if ! grep -qs "^exec .* --launch" "$here/../$scheme/run.sh"; then
    echo "run.sh: there is no scheme '$scheme'; the schemes are the folders in the README's first table, such as --scheme=DOWNPOUR" >&2
    exit 2
fi
