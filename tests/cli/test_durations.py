"""Durations on the command line: what is none says which option it came with, and what to write instead."""

import pytest

from pdctl.cli.run import seconds
from pdctl.exits import UsageError

COMMANDS = [
    (["up", "demo", "--timeout", "0"], "--timeout 0: must be above 0"),
    (["down", "--drain", "5 parsecs"], "--drain 5 parsecs: not a duration"),
    (["wait", "--timeout", "0s"], "--timeout 0s: must be above 0"),
    (["wait", "--timeout", "-5"], "--timeout -5: not a duration"),
    (["set", "router.queue_high=9", "--revert-after", "0"], "--revert-after 0: must be above 0"),
    (["drain", "decode-0", "--wait", "--timeout", "0"], "--timeout 0: must be above 0"),
    (["scale", "decode=2", "--timeout", "0"], "--timeout 0: must be above 0"),
    (["role", "decode-0", "prefill", "--timeout", "0"], "--timeout 0: must be above 0"),
    (["logs", "--since", "yesterday"], "--since yesterday: not a duration"),
    (["tui", "--refresh", "0"], "--refresh 0: must be above 0"),
    (["bench", "--quick", "--limit", "0"], "--limit 0: must be above 0"),
    (["bench", "--within", "0"], "--within 0: must be above 0"),
    (["plan", "--prompt", "9", "--output", "9", "--ttft", "0"], "--ttft 0: must be above 0"),
]


def test_what_passes() -> None:
    assert seconds(None, "--timeout", without="no limit") is None
    assert seconds("250ms", "--timeout", without="no limit") == 0.25
    assert seconds("0", "--drain", without="30s", may_be_0=True) == 0.0


@pytest.mark.parametrize(("line", "said"), COMMANDS, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_what_is_refused(line: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Before anything is looked for: nothing runs here."""
    from pdctl.cli.app import _load_commands, app

    _load_commands()
    monkeypatch.setenv("PDCTL_STATE_DIR", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        app(line, standalone_mode=False)
    assert said in caught.value.message
    assert line[-2] in caught.value.help and "30s" in caught.value.help
