"""`python -m swaptrain`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python puts the current directory first. Modules that a library imports must not come from
    # there: it may be a run directory of somebody else, with a `yaml.py` in it. Where the config
    # names a module of the user's, `model.python` puts the directory back.
    if sys.path and sys.path[0] in {"", os.getcwd()} and not sys.flags.safe_path:
        del sys.path[0]
    from swaptrain.cli import main

    sys.exit(main())
