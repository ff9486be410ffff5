#!/usr/bin/env bash
# Builds the book and tests it in Chromium: bash book/test.sh. Arguments go to pytest.
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
bash "$here/build.sh" || { echo "book: the build failed" >&2; exit 1; }
cd "$here/.." && exec "$here/.venv/bin/python" -m pytest -rs book/test_book.py "$@"
