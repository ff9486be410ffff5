#!/usr/bin/env bash
# Writes the manifest of one training for Kubernetes. `bash manifest.sh SCHEME --help` lists the flags.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../../common/setup.sh"
exec "$PYTHON" "$here/manifest.py" "$@"
