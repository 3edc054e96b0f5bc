"""The command line. Every command imports what it needs when it runs, so that `--help` costs only typer."""

from pdctl.cli.app import main

__all__ = ["main"]
