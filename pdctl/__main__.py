"""`python -P -m pdctl` and the `pdctl` script."""

import sys

from pdctl.cli import main

if __name__ == "__main__":
    sys.exit(main())
