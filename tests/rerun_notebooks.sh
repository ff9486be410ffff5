#!/usr/bin/env bash
# Runs notebooks again and writes what they print and draw into them.
#
#     bash tests/rerun_notebooks.sh                    # all of them, half an hour
#     bash tests/rerun_notebooks.sh HogWild/HogWild.ipynb
#
# The three of Basics-Tutorial/Multiple-Workers are one cluster: they run together. A notebook that fails stays as it is.
# What the tests compare (cells with the tag nbval-check-output) should not change unless the code does: look at `git diff`.
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
cd "$here/.." || exit 1

rerun() { # a notebook, in its own folder, with this Python as its kernel whatever kernel it was saved with
    "$PYTHON" - "$1" <<'PYTHON'
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

path = Path(sys.argv[1])
notebook = nbformat.read(path, as_version=4)
kernel = notebook.metadata.pop("kernelspec", None)
client = NotebookClient(
    notebook,
    timeout=900,  # seconds a cell
    kernel_name="python3",
    coalesce_streams=True,  # of a line of progress, what it ended as
    extra_arguments=["--IPKernelApp.log_level=40"],
    resources={"metadata": {"path": str(path.parent)}},
)
try:
    client.execute()
except CellExecutionError as error:
    sys.exit(f"{path}: {error}")
if kernel:
    notebook.metadata["kernelspec"] = kernel
for cell in notebook.cells:
    cell.metadata.pop("execution", None)
nbformat.write(notebook, path)
print(f"{path}: written", flush=True)
PYTHON
}

shopt -s nullglob
notebooks=("$@")
[[ $# -gt 0 ]] || notebooks=(*/*.ipynb Basics-Tutorial/Multiple-Workers/Parameter-Server.ipynb)
status=0
for notebook in "${notebooks[@]}"; do
    if [[ $notebook == *Multiple-Workers/* ]]; then
        tasks=()
        for one in Parameter-Server Worker-1 Worker-2; do
            rerun "Basics-Tutorial/Multiple-Workers/$one.ipynb" & tasks+=($!)
        done
        for task in "${tasks[@]}"; do wait "$task" || status=1; done
    else
        rerun "$notebook" || status=1
    fi
done
exit "$status"
