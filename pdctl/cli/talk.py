"""`smoke`, `chat`: talking to the router."""

from typing import Annotated

import typer

from pdctl.cli.app import settings
from pdctl.cli.run import Name, NameOption
from pdctl.cli.stack import AsJson
from pdctl.exits import Exit, UsageError


def register(app: typer.Typer) -> None:
    app.command()(smoke)
    app.command()(chat)


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


def chat(
    context: typer.Context,
    name: Name = None,
    name_option: NameOption = None,
    message: Annotated[str | None, typer.Option("-m", "--message", help="one question, then end")] = None,
    system: Annotated[str, typer.Option(help="the system message")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
) -> int:
    """A conversation, with token rate and stage times after each answer. Without a terminal: stdin is the question."""
    from pdctl import chat as conversation
    from pdctl.client import openai
    from pdctl.rundir import find
    from pdctl.status import running

    if message is not None and not message.strip():
        raise UsageError("--message is empty")
    client = openai(running(find(settings(context).root, name or name_option)))
    conversation.run(client, message=message, system=system, max_tokens=max_tokens, temperature=temperature)
    return Exit.OK
