#!/usr/bin/env bash
# Measures what each scheme takes until half of the next characters of a text are right.
# `bash benchmarks/time_to_accuracy.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/time_to_accuracy.py" "$@"
