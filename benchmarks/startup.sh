#!/usr/bin/env bash
# Shows where the time goes between `bash run.sh` and the first step. `bash benchmarks/startup.sh --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/startup.py" "$@"
