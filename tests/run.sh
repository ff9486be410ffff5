#!/usr/bin/env bash
# Every test: ruff, mypy, then pytest over tests/ and over every cell of every notebook.
#
#     bash tests/run.sh                        # everything
#     bash tests/run.sh --fast                 # no clusters, no notebooks, nothing slow: under 4 minutes
#     bash tests/run.sh -k setup               # arguments go to pytest
#     bash tests/run.sh HogWild/HogWild.ipynb  # so do paths, instead of everything
#
# All but those that need Slurm, which are for `bash Multiple-Machines/test_slurm.sh`.
#
# Fails if any of the three does. pytest runs in any case, and last, so that its verdict is the last line.
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
cd "$here/.." || exit 1

status=0
"$PYTHON" -m ruff check --quiet . || { status=1; echo "ruff: failed" >&2; }
"$PYTHON" -m mypy --no-error-summary || { status=1; echo "mypy: failed" >&2; }

shopt -s nullglob
what=(--ignore=tests/test_slurm.py tests */*.ipynb)
# Three at a time: much of a test is waiting for processes to start or to be missed. What is in one file stays together and in
# its order.
parallel=(-n 3 --dist loadfile)
if [[ ${1:-} == --fast ]]; then
    shift
    what=(--ignore=tests/test_slurm.py tests -m "not cluster and not slow")
fi
for argument in "$@"; do
    [[ ! -e ${argument%%::*} ]] || what=() parallel=() # the caller says which
done
# A notebook runs in its own folder, with this Python as its kernel whatever kernel it was saved with. Of its outputs,
# those of cells tagged `nbval-check-output` are compared with the committed ones; elsewhere an error is what fails.
"$PYTHON" -m pytest -rs -p tests.nbval_numbers --nbval-lax --nbval-current-env ${parallel[@]+"${parallel[@]}"} ${what[@]+"${what[@]}"} "$@" || status=$?
exit "$status"
