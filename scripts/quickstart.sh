#!/usr/bin/env bash
# Makes .venv if needed, trains configs/quickstart.yaml, and lets the model write. Arguments are
# passed on, such as train.steps=200 or --fresh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment
"$VENV/bin/python" -m swaptrain --config configs/quickstart.yaml "$@"
keys=()
for word in "$@"; do
    if [[ "$word" != -* && "$word" == *=* ]]; then keys+=(--set "$word"); fi
done
echo "what it writes after 'def ':"
exec "$VENV/bin/python" -m swaptrain generate --config configs/quickstart.yaml ${keys[@]+"${keys[@]}"} \
    --prompt "def " --max-new-tokens 60 --temperature 0.7
