"""`get`, `set`, `undo`, `reset`, `history`, `drain`, `resume`: what a running stack can be told. Refused: exit 7."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from pdctl.cli.app import settings
from pdctl.cli.run import NameOption
from pdctl.exits import Exit, UsageError
from pdctl.render import note, print_json, table

AsJson = Annotated[bool, typer.Option("--json", help="for programs")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check it, change nothing")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="goes into the history")]


def register(app: typer.Typer) -> None:
    app.command("get")(get)
    app.command("set")(set_)
    app.command()(undo)
    app.command()(reset)
    app.command()(history)
    app.command()(drain)
    app.command()(resume)
    app.command()(scale)
    app.command()(role)


def get(
    context: typer.Context,
    knob: Annotated[str | None, typer.Argument(metavar="[KNOB]", help="one, or a section; default: all")] = None,
    name: NameOption = None,
    as_json: AsJson = False,
) -> int:
    """What can be changed while the stack runs: now, boot, range, when it applies."""
    from pdctl.tune import narrow

    answer = _client(context, name).get("/admin/knobs")
    knobs = narrow(answer["knobs"], knob)
    if as_json:
        print_json({"version": 1, "rev": answer["rev"], "knobs": knobs})
        return Exit.OK
    rows = [
        [key, _now(k), str(k["boot"]), _range(k), k["unit"], k["applies"]]
        for key, k in knobs.items()
    ]  # fmt: skip
    print(table(rows, ("KNOB", "NOW", "BOOT", "RANGE", "UNIT", "APPLIES")))
    if knob in knobs:
        note(knobs[knob]["help"])
    note(f"revision {answer['rev']}{', read-only' if answer['read_only'] else ''}")
    return Exit.OK


def set_(
    context: typer.Context,
    changes: Annotated[list[str], typer.Argument(metavar="KNOB=VALUE...")],
    name: NameOption = None,
    dry_run: DryRun = False,
    if_rev: Annotated[int | None, typer.Option(help="only if this is still the newest revision")] = None,
    revert_after: Annotated[str | None, typer.Option(metavar="TIME", help="take it back unless set again")] = None,
    reason: Reason = "",
    save: Annotated[bool, typer.Option("--save", help="into the profile file too, comments kept")] = False,
    force: Annotated[bool, typer.Option("--force", help="past the limits of [tune]")] = False,
    as_json: AsJson = False,
) -> int:
    """Change knobs while the stack runs. Done means: every worker has confirmed."""
    from pdctl.cli.run import seconds
    from pdctl.profile import parse_set
    from pdctl.profile_edit import Draft
    from pdctl.tune import who

    values: dict[str, Any] = {}
    for path, value in map(parse_set, changes):
        knob = ".".join(path)
        if knob in values:
            raise UsageError(f"{knob} is given twice: {values[knob]} and {value}")
        values[knob] = value
    body = {
        "values": values,
        "dry_run": dry_run,
        "if_rev": if_rev,
        "revert_after_s": seconds(revert_after, "--revert-after", without="the change stays") or 0.0,
        "reason": reason,
        "force": force,
        "by": who(),
    }
    if save and revert_after:
        raise UsageError("--save keeps a change and --revert-after takes it back: give one of them")
    client = _client(context, name)
    draft = Draft(Path(_stack(context, name).profile_file), values) if save and not dry_run else None
    try:
        answer = client.call("PATCH", "/admin/knobs", body)
    except BaseException:
        if draft is not None:
            draft.drop()
        raise
    _show(answer, as_json)
    if draft is not None:
        note(f"saved in {draft.keep()}")
    return Exit.OK


def undo(
    context: typer.Context,
    rev: Annotated[int | None, typer.Argument(metavar="[REV]", help="default: the newest not yet undone")] = None,
    name: NameOption = None,
    dry_run: DryRun = False,
    reason: Reason = "",
    as_json: AsJson = False,
) -> int:
    """Take a change back. It is a new revision."""
    return _post(context, name, "undo", {"rev": rev, "dry_run": dry_run, "reason": reason}, as_json)


def reset(
    context: typer.Context,
    knobs: Annotated[list[str] | None, typer.Argument(metavar="[KNOB]...", help="default: all")] = None,
    name: NameOption = None,
    dry_run: DryRun = False,
    reason: Reason = "",
    as_json: AsJson = False,
) -> int:
    """Back to what the profile said."""
    return _post(context, name, "reset", {"knobs": knobs or None, "dry_run": dry_run, "reason": reason}, as_json)


def history(context: typer.Context, name: NameOption = None, as_json: AsJson = False) -> int:
    """Who changed what, and why."""
    import time

    answer = _client(context, name).get("/admin/audit")
    if as_json:
        print_json(answer)
        return Exit.OK
    rows = [
        [
            str(e["rev"]),
            time.strftime("%H:%M:%S", time.localtime(e["at"])),
            e["op"] + (f" {e['undoes']}" if e["undoes"] else ""),
            e["by"],
            ", ".join(f"{knob} {e['before'][knob]} -> {value}" for knob, value in e["after"].items()),
            e["reason"],
        ]
        for e in answer["entries"]
    ]
    if rows:
        print(table(rows, ("REV", "AT", "WHAT", "BY", "CHANGE", "REASON")))
    note(f"revision {answer['rev']}; 1 is the profile")
    return Exit.OK


def drain(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(metavar="WORKER")],
    name: NameOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="return when it holds nothing any more")] = False,
    timeout: Annotated[str | None, typer.Option(metavar="TIME", help="with --wait: give up after it")] = None,
) -> int:
    """No new work to a worker; what it has goes on to its end."""
    from pdctl.cli.run import seconds
    from pdctl.tune import wait_drained

    limit_s = seconds(timeout, "--timeout", without="no limit")
    client = _client(context, name)
    answer = client.call("POST", _worker_path(worker, "drain"))
    if wait:
        wait_drained(client, worker, limit_s)
        note(f"{worker} is drained")
    else:
        note(f"{worker} is {answer['state']}, {answer['open']} open")
    return Exit.OK


def resume(
    context: typer.Context, worker: Annotated[str, typer.Argument(metavar="WORKER")], name: NameOption = None
) -> int:
    """Work again for a drained worker."""
    answer = _client(context, name).call("POST", _worker_path(worker, "resume"))
    note(f"{worker} is {'ready' if answer['state'] == 'connected' else answer['state']}")
    return Exit.OK


def _worker_path(worker: str, what: str) -> str:
    from pdctl.exits import Refused

    if not re.fullmatch(r"[a-z]+-[0-9]+", worker, re.ASCII):  # what could be no name would be another path
        raise Refused(f"UNKNOWN_WORKER: there is no worker {worker!r}", help="pdctl status")
    return f"/admin/workers/{worker}/{what}"


def scale(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="POOL=COUNT", help="such as decode=2")],
    name: NameOption = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="give up waiting after it")] = "20m",
) -> int:
    """Workers more or fewer of a pool; nothing else is restarted, and those that leave end what they have."""
    from pdctl.cli.run import seconds
    from pdctl.scale import parse

    pool, count = parse(target)
    limit_s = seconds(timeout, "--timeout", without="20m")
    _change(_stack(context, name), {"op": "scale", "role": pool, "workers": count}, limit_s)
    note(f"{pool} has {count} workers")
    return Exit.OK


def role(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="the last of its pool")],
    target: Annotated[str, typer.Argument(metavar="prefill|decode")],
    name: NameOption = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="give up waiting after it")] = "20m",
) -> int:
    """A prefill worker becomes a decode worker, or back: drained first, its model stays loaded."""
    from pdctl.cli.run import seconds

    if target not in ("prefill", "decode"):
        raise UsageError(f"{target}: expected prefill or decode")
    limit_s = seconds(timeout, "--timeout", without="20m")
    _change(_stack(context, name), {"op": "role", "worker": worker, "role": target}, limit_s)
    note(f"{worker} is a {target} worker now: pdctl status")
    return Exit.OK


def _change(stack: Any, request: dict[str, Any], timeout_s: float | None) -> None:
    """Asks the supervisor for other pools and waits until it is through. Raises Refused, TimedOut."""
    from pdctl.control import ask
    from pdctl.exits import Refused
    from pdctl.scale import wait

    answer = ask(stack.control, request)
    if not answer.get("ok"):
        raise Refused(str(answer.get("error")))
    problem = wait(lambda: ask(stack.control, {"op": "status"}, timeout_s=5.0), timeout_s or 1200.0)
    if problem:
        raise Refused(problem)


def _post(context: typer.Context, name: str | None, what: str, body: dict[str, Any], as_json: bool) -> int:
    from pdctl.tune import who

    answer = _client(context, name).call("POST", f"/admin/knobs/{what}", {**body, "by": who()})
    _show(answer, as_json)
    return Exit.OK


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    for knob, change in answer["changed"].items():
        print(f"{knob}  {change['from']} -> {change['to']}")
    said = "would change" if answer["dry_run"] else f"revision {answer['rev']}"
    if not answer["changed"]:
        said = f"nothing to change, revision {answer['rev']}"
    waits = f"; not confirmed yet by {', '.join(answer['pending'])}" if answer["pending"] else ""
    note(said + waits)


def _now(knob: dict[str, Any]) -> str:
    return f"{knob['now']} ({knob['measured']})" if "measured" in knob else str(knob["now"])


def _range(knob: dict[str, Any]) -> str:
    low, high = knob["range"]
    return f"{low}..{high}{' or auto' if knob['auto'] else ''}"


def _stack(context: typer.Context, name: str | None) -> Any:
    from pdctl.rundir import find
    from pdctl.status import running

    return running(find(settings(context).root, name))


def _client(context: typer.Context, name: str | None) -> Any:
    from pdctl.client import admin
    from pdctl.rundir import find
    from pdctl.status import running

    stack_dir = find(settings(context).root, name)
    return admin(stack_dir, running(stack_dir))
