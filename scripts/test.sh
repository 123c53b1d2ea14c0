#!/usr/bin/env bash
# Makes .venv if needed, with what the tests need, and runs them, two at a time.
#
#     bash scripts/test.sh                  # the properties that matter, at small sizes
#     bash scripts/test.sh quick            # those of them that train nothing
#     bash scripts/test.sh proof            # everything that must hold, of a matrix each pair
#     bash scripts/test.sh proof --whole    # whole matrices and sweeps too, for hours
#
# Further arguments are pytest's; with `-n 0` tests run one after the other, in one process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
    quick) shift; set -- -m "not trains and not proof and not whole" "$@" ;;
    proof)
        shift
        if [[ "${1:-}" == --whole ]]; then shift; set -- -m "" "$@"; else set -- -m "not whole" "$@"; fi
        ;;
esac
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
