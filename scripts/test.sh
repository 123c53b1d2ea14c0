#!/usr/bin/env bash
# Makes .venv if needed, with what the tests need, and runs them, two at a time. Arguments are
# pytest's; with `-n 0` they run one after the other, in one process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment dev
# swaptrain refuses to train on a file system that is RAM, and on some systems /tmp is one.
if [[ "$(stat --file-system --format=%T "${TMPDIR:-/tmp}")" =~ ^(tmpfs|ramfs)$ ]]; then
    export TMPDIR="$PWD/runs/tmp"
    mkdir -p "$TMPDIR"
fi
# As the command does for itself: what torch takes, which the tests measure, scatters less.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.tcache_count=0"
exec "$VENV/bin/python" -m pytest -n 2 --dist worksteal "$@"
