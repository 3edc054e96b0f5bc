"""`smoke`: talking to the router."""

import typer

from pdctl.cli.app import settings
from pdctl.cli.run import Name, NameOption
from pdctl.cli.stack import AsJson
from pdctl.exits import Exit


def register(app: typer.Typer) -> None:
    app.command()(smoke)


def smoke(context: typer.Context, name: Name = None, name_option: NameOption = None, as_json: AsJson = False) -> int:
    """One call of each kind, with what it must bring. Exit 8 when something is missed."""
    from pdctl import smoke as steps
    from pdctl.client import openai
    from pdctl.render import print_json
    from pdctl.rundir import find
    from pdctl.status import running

    stack = running(find(settings(context).root, name or name_option))
    has_pools = bool(stack.profile.get("prefill", {}).get("workers"))
    done = steps.run(openai(stack), expects_transfer=has_pools)
    if as_json:
        print_json(steps.to_json(done))
    else:
        print(steps.show(done))
    return Exit.MISSED if any(step.missed for step in done) else Exit.OK
