"""`tui` and `top`: looking at a stack for longer than one answer."""

from typing import Annotated

import typer

from pdctl.cli.app import settings
from pdctl.cli.run import Name, NameOption, seconds
from pdctl.cli.stack import AsJson
from pdctl.exits import Exit, UsageError


def register(app: typer.Typer) -> None:
    app.command()(tui)
    app.command()(top)


def tui(
    context: typer.Context,
    name: Name = None,
    name_option: NameOption = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="no key changes anything")] = False,
    host: Annotated[
        str, typer.Option(metavar="URL|ssh://BOX", help="a stack elsewhere; its key: PDCTL_ADMIN_KEY")
    ] = "",
    replay: Annotated[str, typer.Option(metavar="FILE", help="a recorded history.db")] = "",
    theme: Annotated[str, typer.Option(help="dark | light | cb-safe | ansi; default: the profile's")] = "",
    ascii: Annotated[bool, typer.Option("--ascii", help="no box drawing, blocks or braille")] = False,
    refresh: Annotated[str | None, typer.Option(metavar="TIME", help="default: the profile's tui.refresh")] = None,
    no_mouse: Annotated[bool, typer.Option("--no-mouse", help="the terminal keeps the mouse")] = False,
    web: Annotated[bool, typer.Option("--web", help="as a page on this machine, read-only")] = False,
    web_port: Annotated[int, typer.Option(help="with --web; 0 picks a free one")] = 0,
) -> int:
    """The console: pools, workers, requests, knobs, logs. q leaves it; servers keep running."""
    from pdctl.tui import start

    order = start.Order(
        name=name or name_option,
        root=settings(context).root,
        is_read_only=read_only,
        host=host,
        replay=replay,
        theme=theme,
        is_ascii=ascii,
        refresh_s=seconds(refresh, "--refresh", without="tui.refresh of the profile"),
        has_mouse=not no_mouse,
    )
    return start.web(order, web_port) if web else start.run(order)


def top(
    context: typer.Context,
    name: Name = None,
    name_option: NameOption = None,
    once: Annotated[bool, typer.Option("--once", help="one screen, then end; the console without it")] = False,
    as_json: AsJson = False,
) -> int:
    """The overview as text, or with --json the figures behind it."""
    from pdctl.tui import top as printing

    if not once and not as_json:
        raise UsageError("top prints once: say --once", help="pdctl tui is the one that stays open")
    return printing.run(settings(context).root, name or name_option, as_json=as_json) or Exit.OK
