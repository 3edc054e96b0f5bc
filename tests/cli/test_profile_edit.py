"""`profile new` and `profile edit`: files of this user's, checked, and what was there left as it was."""

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdctl.exits import Exit
from pdctl.profile import find, load
from tests.process.box import TREE, Box


def own(box: Box, name: str) -> Path:
    return box.folder / "config" / "pdctl" / "profiles" / f"{name}.toml"


def test_a_new_profile_is_a_copy_that_starts(box: Box) -> None:
    answer = box("profile", "new", "mine", "--from", str(box.profile), "--set", "router.queue_high=9")
    assert answer.stdout == f"{own(box, 'mine')}\n"
    assert "pdctl up mine -d" in answer.stderr
    assert 'name = "mine"' in own(box, "mine").read_text()
    loaded = load(str(own(box, "mine")))
    assert (loaded.config.name, loaded.config.router.queue_high, loaded.config.router.port) == ("mine", 9, 0)
    assert "mine" in box("profile", "ls").stdout


def test_without_from_it_is_the_demo_with_its_comments(box: Box) -> None:
    box("profile", "new", "mine")
    comments = [line for line in find("demo").read_text().splitlines() if line.startswith("#")]
    assert comments
    assert [line for line in own(box, "mine").read_text().splitlines() if line.startswith("#")] == comments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo"], "there is a profile demo already"),
        (["../mine"], "'../mine' cannot be a name"),
        (["mine", "--from", "nosuch"], "there is no profile 'nosuch'"),
        (["mine", "--set", "router.prot=1"], "router.prot is not a key"),
        (["mine", "--set", "decode.workers=0"], "go together"),
        ([], "Missing argument"),
    ],
)
def test_what_would_not_start_is_not_kept(box: Box, arguments: list[str], said: str) -> None:
    assert said in box("profile", "new", *arguments, expect=Exit.USAGE).stderr
    assert not own(box, "mine").exists()


def edited(box: Box, name: str, script: str) -> tuple[int, str]:
    """`pdctl profile edit` on a terminal of its own, with an editor that runs `script` on the file: (code, screen)."""
    editor = box.folder / "editor"
    editor.write_text(f"#!/bin/sh\n{script}\n")
    editor.chmod(0o755)
    ours, theirs = pty.openpty()
    env = box.env | {"PYTHONPATH": str(TREE), "EDITOR": str(editor), "VISUAL": ""}
    argv = [sys.executable, "-P", "-m", "pdctl", "profile", "edit", name]
    done = subprocess.run(
        argv,
        env=env,
        cwd=box.folder,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )
    os.close(ours)
    os.close(theirs)
    return done.returncode, done.stderr


@pytest.mark.skipif(shutil.which("sed") is None, reason="needs sed")
def test_edit_opens_the_editor_and_checks_what_it_left(box: Box) -> None:
    code, said = edited(box, "box.toml", 'sed -i "s/^port = 0/port = 8123/" "$1"')
    assert (code, "ok, 2 workers" in said) == (Exit.OK, True)
    assert "port = 8123" in box.profile.read_text()
    # Nonsense is kept, for its author to mend, and said with its place.
    code, said = edited(box, "box.toml", 'sed -i "s/^port = 8123/prot = 8123/" "$1"')
    assert code == Exit.USAGE
    assert "box.toml:4: router.prot is not a key" in said


def test_edit_of_a_shipped_profile_makes_your_own(box: Box) -> None:
    shipped = find("colocated").read_text()
    # 1. Looked at and left: no copy stays.
    assert edited(box, "colocated", "true") == (Exit.OK, "nothing was changed\n")
    assert not own(box, "colocated").exists()
    # 2. Changed: the copy is found first from now on.
    code, said = edited(box, "colocated", 'echo "# mine" >> "$1"')
    assert (code, str(own(box, "colocated")) in said) == (Exit.OK, True)
    assert own(box, "colocated").read_text() == shipped + "# mine\n"
    assert find("colocated").read_text() == shipped
    assert str(own(box, "colocated")) in box("profile", "ls").stdout


def test_an_editor_that_fails_is_said(box: Box) -> None:
    code, said = edited(box, "box.toml", "exit 3")
    assert code == Exit.USAGE
    assert "ended with code 3" in said
