#!/usr/bin/env bash
# Makes .venv if needed, with what the tests need, and runs them. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment dev
# swaptrain refuses to train on a file system that is RAM, and on some systems /tmp is one.
if [[ "$(stat --file-system --format=%T "${TMPDIR:-/tmp}")" =~ ^(tmpfs|ramfs)$ ]]; then
    export TMPDIR="$PWD/runs/tmp"
    mkdir -p "$TMPDIR"
fi
exec "$VENV/bin/python" -m pytest "$@"
