#!/usr/bin/env bash
# Makes an environment with DeepSpeed and what the job needs: bash scripts/peers/environment.sh [DIRECTORY]
# For a GPU, where CUDA's compiler is: DS_ACCELERATOR=cuda bash scripts/peers/environment.sh
# Compiles the parts of DeepSpeed that are in C++, which takes five minutes and needs, on Debian:
#   apt-get install libaio-dev ninja-build g++ libtcmalloc-minimal4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv="${1:-.venv-deepspeed}"
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
[[ -x "$venv/bin/pip" ]] || python3 -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" "torch==2.13.0" numpy "transformers>=5,<6" accelerate safetensors psutil setuptools wheel ninja py-cpuinfo
DS_BUILD_OPS=0 "${pip[@]}" "deepspeed==0.19.8" --no-build-isolation
# Compiled here, with all the machine's memory, and not at the first start, which a benchmark limits.
"$venv/bin/python" - <<'PY'
from deepspeed.accelerator import get_accelerator

for name in ("ShareMemCommBuilder", "PinMemoryBuilder", "AsyncIOBuilder", "CPUAdamBuilder"):
    builder = get_accelerator().create_op_builder(name)
    if builder is not None:
        builder.load()
PY
