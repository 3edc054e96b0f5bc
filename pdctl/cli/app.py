"""The one typer app: global options, and one door through which every error leaves with its exit code."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from pdctl.exits import Exit, exit_of
from pdctl.quiet import interruptible
from pdctl.render import Style, print_error
from server.errors import PdctlError


@dataclass(frozen=True, slots=True)
class Settings:
    """What the global options say."""

    state_dir: str | None = None
    is_quiet: bool = False
    is_verbose: ClassVar[bool] = False

    @property
    def root(self) -> Path:
        from pdctl.rundir import state_root

        return state_root(self.state_dir)


def settings(context: typer.Context) -> Settings:
    found = context.find_object(Settings)
    return found if found is not None else Settings()


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(version("pdctl"))
        except PackageNotFoundError:
            print("0 (source tree)")
        raise typer.Exit


app = typer.Typer(
    name="pdctl",
    help="Serve an LLM with prefill and decode on devices of their own.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    context: typer.Context,
    state_dir: Annotated[str | None, typer.Option(help="folder of all stacks; default $XDG_STATE_HOME/pdctl")] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="only data and errors")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="of an error also where it came from")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="as NO_COLOR=1")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    Style.is_off, Settings.is_verbose = no_color, verbose
    if state_dir is not None:
        # Children that are started by name, the TUI for one, look at the same place.
        os.environ["PDCTL_STATE_DIR"] = str(Path(state_dir).expanduser().absolute())
    context.obj = Settings(state_dir, quiet)


def _load_commands() -> None:
    """In the order of the help; once a process."""
    if app.registered_commands:
        return
    from pdctl.cli import bench, plan, profiles, run, stack, talk, tune, watch

    for module in (run, stack, watch, tune, talk, bench, plan, profiles):
        module.register(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the return value is the exit code."""
    _load_commands()
    try:
        with interruptible():
            result = app(args=list(argv) if argv is not None else None, prog_name="pdctl", standalone_mode=False)
            sys.stdout.flush()
    except PdctlError as error:
        if Settings.is_verbose:
            import traceback

            traceback.print_exc()
        print_error(error)
        return int(exit_of(error))
    except (KeyboardInterrupt, typer.Abort):
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        # `pdctl logs | head`: the reader has enough. Python must not complain when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.OK)
    except Exception as error:
        return _usage(error)
    return int(result) if isinstance(result, int) else int(Exit.OK)


def _usage(error: Exception) -> int:
    """typer brings its own copy of click, so its errors are known by their face."""
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if show is None or code is None:
        raise error
    show()
    return int(code)
