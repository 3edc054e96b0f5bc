"""`python -P -m pdctl` and the `pdctl` script."""

import sys

from pdctl.quiet import quiet_until_ready

quiet_until_ready()


def main() -> int:
    from pdctl.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
