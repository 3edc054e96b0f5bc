"""`status`, `ls`, `logs`, `env`, `info`, `completion`: looking at what runs."""

from typing import Annotated

import typer

from pdctl.cli.app import settings
from pdctl.cli.run import Name, NameOption
from pdctl.exits import Exit, UsageError
from pdctl.render import Style, duration, note, print_json, table

AsJson = Annotated[bool, typer.Option("--json", help="for programs")]


def register(app: typer.Typer) -> None:
    app.command()(status)
    app.command("ls")(ls)
    app.command()(logs)
    app.command()(env)
    app.command()(doctor)
    app.command()(info)
    app.command()(completion)


def status(
    context: typer.Context,
    name: Name = None,
    name_option: NameOption = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="again every second until Ctrl-C")] = False,
) -> int:
    """What runs and how it is. Exit: 0 ready, 3 not running, 4 supervisor gone, 6 starting or degraded."""
    import sys
    import time

    from pdctl.rundir import find
    from pdctl.status import gather, show

    stack_dir = find(settings(context).root, name or name_option)
    while True:
        value, code = gather(stack_dir)
        if as_json:
            print_json(value)
        else:
            if watch and sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")
            print(show(value, Style(sys.stdout)), flush=True)
        if not watch:
            return code
        time.sleep(1.0)


def ls(
    context: typer.Context,
    all: Annotated[bool, typer.Option("-a", "--all", help="also those that ended or did not start")] = False,
    as_json: AsJson = False,
) -> int:
    """The running stacks of this user on this host."""
    from pdctl.rundir import stacks
    from pdctl.status import gather

    known = stacks(settings(context).root)
    shown = [s for s in known if all or ((state := s.read()) is not None and not state.is_over)]
    values = [gather(stack_dir)[0] for stack_dir in shown]
    if as_json:
        print_json({"version": 1, "stacks": values})
        return Exit.OK
    rows = [
        [v["name"], v["state"], v.get("url") or "-", str(v["supervisor"]["pid"]), duration(v["uptime_s"]), v["model"]]
        for v in values
    ]
    if rows:
        print(table(rows, ("NAME", "STATE", "ADDRESS", "PID", "UP", "MODEL")))
    if (hidden := len(known) - len(shown)) or not known:
        note(f"{hidden} that ended: pdctl ls -a" if hidden else "no stack has been started")
    return Exit.OK


def logs(
    context: typer.Context,
    which: Annotated[list[str] | None, typer.Argument(metavar="[WORKER|ROLE]...", help="default: all")] = None,
    name: NameOption = None,
    follow: Annotated[bool, typer.Option("-f", "--follow")] = False,
    count: Annotated[int, typer.Option("-c", "--lines", min=1, help="the last lines")] = 200,
    since: Annotated[str | None, typer.Option(help="such as 10m")] = None,
    level: Annotated[str, typer.Option(help="debug | info | warn | error")] = "",
    grep: Annotated[str, typer.Option(metavar="RE")] = "",
    previous: Annotated[bool, typer.Option("--prev", help="of the start before")] = False,
    times: Annotated[bool, typer.Option("-t", "--times", help="date and time")] = False,
    no_prefix: Annotated[bool, typer.Option("--no-prefix")] = False,
    as_json: AsJson = False,
) -> int:
    """What the processes of a stack wrote."""
    from pdctl import logs as files
    from pdctl.cli.run import seconds
    from pdctl.down import supervisor_of
    from pdctl.render import LogPrinter
    from pdctl.rundir import find

    files.check_filters(level, grep)
    age_s = seconds(since, "--since", without="as far back as --lines goes")
    stack_dir = find(settings(context).root, name)
    stack = stack_dir.read()
    chosen = _choose(sorted(path.stem for path in (stack_dir.path / "logs").glob("*.log")), which or [])
    suffix = ".log.prev" if previous else ".log"
    paths = [(process, stack_dir.log(process).with_suffix(suffix)) for process in chosen]
    import time

    after = 0.0 if age_s is None else time.time() - age_s
    printer = LogPrinter(chosen, has_prefix=not no_prefix, has_date=times, is_json=as_json)
    for line in files.read(paths, count, lambda line: files.wanted(line, level=level, grep=grep, since=after)):
        printer.show(line)
    if follow and not previous and stack is not None:
        supervisor = supervisor_of(stack)
        for line in files.follow(paths, is_over=lambda: not supervisor.is_alive):
            if files.wanted(line, level=level, grep=grep):
                printer.show(line)
    return Exit.OK


def _choose(there: list[str], which: list[str]) -> list[str]:
    """Names, or roles: "decode" is every decode worker."""
    if not which:
        return there
    chosen = []
    for word in which:
        matches = [process for process in there if process == word or process.rpartition("-")[0] == word]
        if not matches:
            raise UsageError(f"no log of {word!r}", help=f"there are: {', '.join(there)}")
        chosen += matches
    return list(dict.fromkeys(chosen))


def env(context: typer.Context, name: Name = None, name_option: NameOption = None) -> int:
    """Shell lines for OpenAI clients: eval $(pdctl env)."""
    import shlex

    from pdctl.client import api_key
    from pdctl.rundir import find
    from pdctl.status import running

    stack = running(find(settings(context).root, name or name_option))
    print(f"export OPENAI_BASE_URL={shlex.quote(f'{stack.url}/v1')}")
    print(f"export OPENAI_API_KEY={shlex.quote(api_key(stack))}")
    return Exit.OK


def doctor(
    context: typer.Context,
    as_json: AsJson = False,
    measures: Annotated[bool, typer.Option("--measure/--no-measure", help="transports, about 10 s")] = True,
) -> int:
    """What of this machine and its stacks stands in the way, each with a fix. Exit: 0, or 5 where something fails."""
    from pdctl import doctor as office

    findings, measured = office.examine(settings(context).root, measures=measures)
    if as_json:
        print_json(office.to_json(findings, measured))
    else:
        print(office.show(findings))
    return office.exit_of(findings)


def info(context: typer.Context, name: Name = None, name_option: NameOption = None, as_json: AsJson = False) -> int:
    """What a stack is: model, shape, capacity, routes, versions."""
    from pdctl.info import gather, show
    from pdctl.rundir import find
    from pdctl.status import running

    stack_dir = find(settings(context).root, name or name_option)
    value = gather(stack_dir, running(stack_dir))
    if as_json:
        print_json(value)
    else:
        print(show(value))
    return Exit.OK


def completion(
    shell: Annotated[str, typer.Argument(help="bash | zsh | fish; default: $SHELL", envvar="SHELL")] = "bash",
) -> int:
    """A completion script: eval "$(pdctl completion bash)"."""
    from pathlib import PurePath

    from typer._completion_shared import get_completion_script

    kind = PurePath(shell).name
    if kind not in ("bash", "zsh", "fish"):
        raise UsageError(f"completion {kind}: expected bash, zsh or fish")
    print(get_completion_script(prog_name="pdctl", complete_var="_PDCTL_COMPLETE", shell=kind))
    return Exit.OK
