"""`up`, `run`, `down`, `restart`, `wait`: starting and stopping."""

from typing import Annotated

import typer

from pdctl.cli.app import settings
from pdctl.exits import Exit, NotRunning, TimedOut, Unreachable, UsageError
from pdctl.render import MODES, note

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="over the profile; may be repeated")]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="the stack; may be left out when there is one")]
NameOption = Annotated[str | None, typer.Option("-n", "--name", help="the stack, as the argument")]
Seconds = Annotated[str | None, typer.Option(metavar="TIME", help="such as 30s or 5m")]


def register(app: typer.Typer) -> None:
    app.command()(up)
    app.command("run")(run)
    app.command()(down)
    app.command()(restart)
    app.command()(wait)


def up(
    context: typer.Context,
    profile: Annotated[str, typer.Argument(envvar="PDCTL_PROFILE", help="name or path of a profile")],
    detach: Annotated[bool, typer.Option("-d", "--detach", help="return when it is ready")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="with -d: return at once")] = False,
    sets: Sets = None,
    name: Annotated[str | None, typer.Option("-n", "--name", help="another name for the stack")] = None,
    timeout: Annotated[str | None, typer.Option(metavar="TIME", help="give up when not ready in time")] = None,
    progress: Annotated[str, typer.Option(help=" | ".join(MODES))] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would start")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="with --dry-run: 0 same as running, 1 differs")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --dry-run")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="never ask (nothing asks today)")] = False,
) -> int:
    """Start a stack: in the foreground until Ctrl-C, or with -d detached."""
    from pdctl import up as starting

    _check_progress(progress)
    limit_s = seconds(timeout, "--timeout", without="supervise.ready_timeout of the profile") or 0
    if no_wait and not detach:
        raise UsageError("--no-wait needs -d: a stack in the foreground lives as long as its command")
    order = starting.prepare(profile, settings(context).root, sets=sets or [], name=name)
    if dry_run:
        return starting.dry_run(order, as_json=as_json, tells_difference=exit_code)
    mode = "quiet" if settings(context).is_quiet and progress == "auto" else progress
    return starting.start(order, is_detached=detach, waits=not no_wait, timeout_s=limit_s, progress=mode)


def run(
    context: typer.Context,
    profile: Annotated[str, typer.Argument(envvar="PDCTL_PROFILE", help="name or path of a profile")],
    sets: Sets = None,
    name: Annotated[str | None, typer.Option("-n", "--name", help="another name for the stack")] = None,
    progress: Annotated[str, typer.Option(help="plain | json | quiet")] = "plain",
) -> int:
    """Start a stack in the foreground for systemd or a container."""
    from pdctl import up as starting

    _check_progress(progress)
    order = starting.prepare(profile, settings(context).root, sets=sets or [], name=name)
    return starting.start(order, is_detached=False, waits=True, timeout_s=0, progress=progress)


def down(
    context: typer.Context,
    name: Name = None,
    name_option: NameOption = None,
    drain: Seconds = None,
    force: Annotated[bool, typer.Option("--force", help="no drain, SIGKILL")] = False,
    orphans: Annotated[bool, typer.Option("--orphans", help="every stack whose supervisor is gone")] = False,
) -> int:
    """Stop a stack and leave no process of it behind; 0 also when there was nothing."""
    from pdctl.down import supervisor_of, take_down
    from pdctl.rundir import find, stacks

    root = settings(context).root
    drain_s = seconds(drain, "--drain", without="supervise.stop_timeout of the profile", may_be_0=True)
    if orphans:
        targets = [s for s in stacks(root) if (state := s.read()) is not None and not supervisor_of(state).is_alive]
    else:
        try:
            targets = [find(root, name or name_option)]
        except NotRunning as error:
            note(error.message)
            return Exit.OK
    was_there = [target.name for target in targets if take_down(target, note, drain_s=drain_s, is_forced=force)]
    note(f"{', '.join(was_there)}: down" if was_there else "nothing was running")
    return Exit.OK


def restart(
    context: typer.Context,
    workers: Annotated[list[str], typer.Argument(help="process names, such as decode-0 or router")],
    name: NameOption = None,
) -> int:
    """Restart single processes of a running stack."""
    from pdctl import control
    from pdctl.rundir import find
    from pdctl.status import running

    stack = running(find(settings(context).root, name))
    for worker in workers:
        answer = control.ask(stack.control, {"op": "restart", "worker": worker}, timeout_s=5.0)
        if not answer.get("ok"):
            raise UsageError(str(answer.get("error")), help=f"there are: {', '.join(answer.get('known', []))}")
        note(f"{worker}: restarting")
    return Exit.OK


def wait(
    context: typer.Context,
    name: Name = None,
    name_option: NameOption = None,
    until: Annotated[str, typer.Option("--for", help="ready | drained | stopped")] = "ready",
    timeout: Seconds = None,
) -> int:
    """Return when a stack is ready, drained or stopped."""
    import time

    from pdctl.rundir import find
    from pdctl.status import gather

    if until not in ("ready", "drained", "stopped"):
        raise UsageError(f"--for {until}: expected ready, drained or stopped")
    limit_s = seconds(timeout, "--timeout", without="no limit")
    stack_dir = find(settings(context).root, name or name_option)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while True:
        value, code = gather(stack_dir)
        router = next((process["state"] for process in value["processes"] if process["name"] == "router"), "stopped")
        if (until == "stopped" or router == "stopped") and code == Exit.NOT_RUNNING:
            if until == "ready":
                raise NotRunning(f"{stack_dir.name} is {value['state']}: {value.get('reason', '')}")
            return Exit.OK
        if (until == "ready" and code == Exit.OK) or (until == "drained" and router == "stopped"):
            return Exit.OK
        if code == Exit.UNREACHABLE and until == "ready":
            raise Unreachable(f"{stack_dir.name}: {value['state']}, it will not become ready", help="pdctl down")
        if deadline is not None and time.monotonic() > deadline:
            raise TimedOut(f"{stack_dir.name} is {value['state']}, not {until}, after {timeout}")
        time.sleep(0.1)


def seconds(text: str | None, option: str, *, without: str, may_be_0: bool = False) -> float | None:
    """Of a duration. `without`: what holds where the option is left out. Raises UsageError."""
    if text is None:
        return None
    from server.config import parse_seconds

    help = f"a duration such as 30s or 250ms; without {option}: {without}"
    try:
        value = float(parse_seconds(text))
    except ValueError as error:
        raise UsageError(f"{option} {text}: not a duration", help=help) from error
    if not value and not may_be_0:
        raise UsageError(f"{option} {text}: must be above 0", help=help)
    return value


def _check_progress(mode: str) -> None:
    if mode not in MODES:
        raise UsageError(f"--progress {mode}: expected {', '.join(MODES)}")
