#!/usr/bin/env bash
# Builds the book, all of this collection as pages for a browser: book/_build/html/index.html. No notebook is executed.
#
#     bash book/build.sh
#
# The first time it makes book/.venv from book/requirements.txt, and for that it needs the network; after that it needs none.
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
source "$here/../common/setup.sh"
set -euo pipefail
cd "$here" # -m and -c execute files of the current folder
venv=$here/.venv
stamp=$venv/made-from
wanted=$("$PYTHON" -V; echo "$venv"; cat "$here/requirements.txt")
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    echo "setting up book/.venv (once)" >&2
    "$PYTHON" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt" </dev/null
    printf '%s\n' "$wanted" >"$stamp"
fi
rm -rf "$here/_build"
# The traces of the player come from the simulator, so this part alone needs TensorFlow.
"$PYTHON" "$here/traces.py" "$here/_build/static/traces"
# As a script, since a page that is opened from a disk may load no JSON
{ echo 'const RULES ='; cat "$here/../Comparison/rules.json"; } >"$here/_build/static/rules.js"
"$venv/bin/python" "$here/collect.py" "$here/_build/source"
# -W: a warning is an error. A link that leads nowhere is a warning. After an error one of Sphinx's two processes may wait for
# the other for ever; on a busy machine a build of two minutes may take twenty.
timeout 1800 "$venv/bin/python" -m sphinx --quiet -W --keep-going -j 2 -c "$here" "$here/_build/source" "$here/_build/html"
echo "$here/_build/html/index.html"
