"""Stands before the real package on PYTHONPATH: fake processes here, everything else from the real one."""

import os
from pathlib import Path

__path__.append(str(Path(os.environ["PDCTL_TEST_TREE"]) / "server"))
