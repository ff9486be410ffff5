#!/usr/bin/env bash
# Every test: ruff, mypy, then pytest over tests/ and over every cell of every notebook.
#
#     bash tests/run.sh                        # everything
#     bash tests/run.sh --fast                 # no clusters, no notebooks, nothing slow; the aim: 2 minutes on two cores
#     bash tests/run.sh --soak                 # everything, and what finds rare faults many times over: rounds of chaos, say
#     bash tests/run.sh -k setup               # arguments go to pytest
#     bash tests/run.sh HogWild/HogWild.ipynb  # so do paths, instead of everything
#
# All but those that need Slurm, which are for `bash Multiple-Machines/test_slurm.sh`.
#
# Fails if any of the three does. ruff and mypy run beside pytest (checks.py), whose verdict is the last line. The time of each test
# is then in runs/tests/times.jsonl (or times-fast, -soak, -part), of which `python tests/timings.py` makes tables (timings.py).
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
cd "$here/.." || exit 1
# Without its bytecode, each process of a test would compile all of `common` again, and each of pytest's all tests.
unset PYTHONDONTWRITEBYTECODE

shopt -s nullglob
what=(--ignore=tests/test_slurm.py tests */*.ipynb)
# A notebook runs in its own folder, with this Python as its kernel whatever kernel it was saved with. Of its outputs,
# those of cells tagged `nbval-check-output` are compared with the committed ones; elsewhere an error is what fails.
notebooks=(-p tests.nbval_numbers -p tests.warm_kernels --nbval-lax --nbval-current-env --nbval-cell-timeout=600)
# One more at a time than there are cores: much of a test is waiting for processes to start or to be missed. The longest come
# first (timings.py).
cores=$(nproc)
parallel=(-n $((cores + 1)))
times=times
if [[ ${1:-} == --fast ]]; then
    shift
    what=(--ignore=tests/test_slurm.py tests -m "not cluster and not slow")
    notebooks=(-p no:nbval) # to import it takes seconds
    parallel=(-n "$cores") # nothing here waits
    times=times-fast
fi
for argument in "$@"; do
    [[ ! -e ${argument%%::*} ]] || what=() parallel=() # the caller says which
    if [[ $argument == --soak* ]]; then times=times-soak; else times=times-part; fi
done
mkdir -p runs/tests
export TESTS_TIMES=$PWD/runs/tests/$times.jsonl
rm -f "$TESTS_TIMES"

exec "$PYTHON" -m pytest -rs -p tests.checks -p tests.timings "${notebooks[@]}" ${parallel[@]+"${parallel[@]}"} \
    ${what[@]+"${what[@]}"} "$@"
