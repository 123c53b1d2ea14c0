"""`python -m swaptrain`."""

from __future__ import annotations

import sys

from swaptrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
