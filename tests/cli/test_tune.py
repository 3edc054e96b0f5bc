"""`set --save`: a profile keeps everything but what was changed; what came with pdctl is copied, not written to."""

from pathlib import Path

import pytest

from pdctl.exits import UsageError
from pdctl.profile import find
from pdctl.profile_edit import save
from pdctl.tune import narrow

PROFILE = """\
# why this machine is tuned so
version = 1

[router]
queue_high = 50 # small: clients retry

[colocated]
workers = 1
"""


def test_comments_and_order_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(PROFILE)
    save(file, {"router.queue_high": 80, "decode.kv_low": 0.5})
    expected = PROFILE.replace("queue_high = 50 #", "queue_high = 80 #") + "\n[decode]\nkv_low = 0.5\n"
    assert file.read_text().split() == expected.split()
    assert "# small: clients retry" in file.read_text()
    assert list(tmp_path.iterdir()) == [file]


def test_a_shipped_profile_is_copied_for_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    shipped = find("demo")
    before = shipped.read_text()
    saved = save(shipped, {"router.queue_high": 80})
    assert saved == tmp_path / "pdctl/profiles/demo.toml"
    assert "queue_high = 80" in saved.read_text()
    assert shipped.read_text() == before


def test_what_was_saved_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack that was started from a shipped profile goes on naming that one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    shipped = find("demo")
    save(shipped, {"router.queue_high": 80})
    text = save(shipped, {"decode.kv_low": 0.7}).read_text()
    assert "queue_high = 80" in text
    assert "kv_low = 0.7" in text


@pytest.mark.parametrize(
    ("text", "values", "says"),
    [
        (PROFILE, {"decode.kv_high": 0.7}, "kv_low"),  # 0.8 where the profile says nothing
        (PROFILE, {"prefill.max_seqs": 4.0}, "max_seqs"),
        (PROFILE + "[half", {"router.queue_high": 80}, "no TOML"),
        ("decode = 1\n" + PROFILE, {"decode.kv_low": 0.7}, "no section"),
    ],
)
def test_what_could_not_start_is_not_saved(tmp_path: Path, text: str, values: dict[str, float], says: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        save(file, values)
    assert file.read_text() == text
    assert list(tmp_path.iterdir()) == [file]


def test_yaml_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not TOML"):
        save(tmp_path / "p.yaml", {})


def test_narrow() -> None:
    knobs = {"decode.kv_low": 1, "decode.kv_high": 2, "router.queue_high": 3}
    assert list(narrow(knobs, "decode")) == ["decode.kv_low", "decode.kv_high"]
    assert list(narrow(knobs, "router.queue_high")) == ["router.queue_high"]
    with pytest.raises(UsageError) as refused:
        narrow(knobs, "router.queue_hihg")
    assert "router.queue_high" in refused.value.help
