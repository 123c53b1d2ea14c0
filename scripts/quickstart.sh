#!/usr/bin/env bash
# Makes .venv if needed, and trains configs/quickstart.yaml. Arguments are passed on, such as
# train.steps=200 or --fresh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment
exec "$VENV/bin/python" -m swaptrain --config configs/quickstart.yaml "$@"
