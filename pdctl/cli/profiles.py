"""`profile` and `config`: what a profile says, and whether it may."""

from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli.run import Sets
from pdctl.exits import Exit, UsageError
from pdctl.render import note, print_json, table_or_list

Profile = Annotated[str, typer.Argument(envvar="PDCTL_PROFILE", help="name or path of a profile")]
profile_app = typer.Typer(help="Profiles on this machine.", no_args_is_help=True, rich_markup_mode=None)
config_app = typer.Typer(help="What a profile resolves to.", no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    app.add_typer(profile_app, name="profile")
    app.add_typer(config_app, name="config")


@profile_app.command("ls")
def profile_ls() -> int:
    """Profiles that a bare name finds."""
    from pdctl.profile import available, purpose

    rows = [[name, str(file), purpose(file).partition(". ")[0]] for name, file in sorted(available().items())]
    print(table_or_list(rows, ("NAME", "FILE", "FOR")))
    return Exit.OK


@profile_app.command("show")
def profile_show(profile: Profile) -> int:
    """A profile's text."""
    from pdctl.profile import find

    print(find(profile).read_text(encoding="utf-8"), end="")
    return Exit.OK


@profile_app.command("new")
def profile_new(
    name: Annotated[str, typer.Argument(help="what it is called, and its stack")],
    base: Annotated[str, typer.Option("--from", metavar="PROFILE", help="which it is a copy of")] = "demo",
    sets: Sets = None,
) -> int:
    """A profile of your own, made from another; prints its file."""
    from pdctl.profile_edit import create

    print(create(name, base, sets or []))
    note(f"change it: pdctl profile edit {name}\nstart it:  pdctl up {name} -d")
    return Exit.OK


@profile_app.command("edit")
def profile_edit(profile: Profile) -> int:
    """Opens a profile in $VISUAL or $EDITOR, and checks it after. Of a shipped one your own copy is made."""
    import os
    import sys

    from pdctl.profile import find, load
    from pdctl.profile_edit import edit, own_file

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("profile edit needs a terminal", help=f"the file is {own_file(find(profile))}")
    file, has_changed = edit(profile, os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    if not has_changed:
        note("nothing was changed")
        return Exit.OK
    loaded = load(str(file))
    note(f"{file}: ok, {len(loaded.config.workers)} workers")
    return Exit.OK


@config_app.command("validate")
def config_validate(profile: Profile, sets: Sets = None) -> int:
    """Checks a profile; every problem is listed."""
    from pdctl.profile import load

    loaded = load(profile, sets=sets or [])
    note(f"{loaded.file}: ok, {len(loaded.config.workers)} workers")
    return Exit.OK


@config_app.command("show")
def config_show(
    profile: Profile,
    sets: Sets = None,
    origin: Annotated[bool, typer.Option("--origin", help="and who said it")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> int:
    """Every key with the value that would run."""
    import json

    from pdctl.profile import leaves, load

    loaded = load(profile, sets=sets or [])
    values = loaded.config.model_dump(mode="json")
    if as_json:
        rows = {".".join(p): {"value": v, "origin": str(loaded.origin(p))} for p, v in leaves(values)}
        print_json({"version": 1, "config": rows} if origin else {"version": 1, "config": values})
        return Exit.OK
    for path, value in leaves(values):
        said = f"  # {loaded.origin(path)}" if origin else ""
        print(f"{'.'.join(path)} = {json.dumps(value)}{said}")
    return Exit.OK


@config_app.command("schema")
def config_schema(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="a file instead of stdout")] = None,
) -> int:
    """JSON Schema of the profile, for editors."""
    import json

    from server.config import Config

    schema = Config.model_json_schema()
    schema["properties"]["extends"] = {"type": "string", "description": "a profile that this one builds on"}
    text = json.dumps(schema, indent=2) + "\n"
    if output is None:
        print(text, end="")
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{output}: {error.strerror}") from error
    return Exit.OK
