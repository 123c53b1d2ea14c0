#!/usr/bin/env bash
# Makes .venv if needed, with what the tests need, and runs them. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment dev
exec "$VENV/bin/python" -m pytest "$@"
