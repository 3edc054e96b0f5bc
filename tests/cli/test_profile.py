"""Profiles: what is refused and in which words, and which layer wins."""

from pathlib import Path
from typing import Any

import pytest

from pdctl.profile import ProfileErrors, available, difference, find, load, parse_set, purpose
from pdctl.profile_check import keys
from server.errors import ConfigError

BASE = "[prefill]\nworkers = 1\n[decode]\nworkers = 1\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def write(text: str, name: str = "x.toml") -> str:
    Path(name).write_text(text)
    return name


def problems(text: str, *sets: str) -> list[tuple[str, str]]:
    with pytest.raises(ProfileErrors) as caught:
        load(write(text), sets=sets)
    return [(problem.message, problem.help) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "message", "help"),
    [
        (
            "[decode]\nworkers = 1\nkv_hihg = 0.9",
            "x.toml:3: decode.kv_hihg is not a key",
            "did you mean decode.kv_high? (0.05..1)",
        ),
        (
            "[prefill]\nkv_high = 0.9",
            "x.toml:2: prefill.kv_high is not a key",
            "did you mean decode.kv_high? (0.05..1)",
        ),
        ("[rooter]\nport = 1", "x.toml:2: rooter is not a key", "did you mean router?"),
        ("[router]\nport = 70000", "x.toml:2: router.port = 70000 is out of range", "allowed: 0..65535"),
        ("[router]\n\nport = 'x'", 'x.toml:3: router.port = "x" is not allowed', "allowed: 0..65535"),
        (
            "[transfer]\nbackend = 'nxil'",
            'x.toml:2: transfer.backend = "nxil" is not allowed',
            "allowed: auto | nixl | tcp",
        ),
        ("[decode]\nkv_low = 0", "x.toml:2: decode.kv_low = 0 is out of range", "allowed: 0.05..1"),
        (
            "prefill.token_budget = 3",
            "x.toml:1: prefill.token_budget = 3 is out of range",
            "allowed: 64..65536 or auto",
        ),
        ("decode = { max_running = 0 }", "x.toml:1: decode.max_running = 0 is out of range", "allowed: 1..4096"),
        ("[router]\nport = true", "x.toml:2: router.port = true is not allowed", "allowed: 0..65535"),
        ("[router]\nport = '80'", 'x.toml:2: router.port = "80" is not allowed', "allowed: 0..65535"),
        ("version = true", "x.toml:1: version = true is not allowed", "allowed: 1"),
        ("[decode]\ncpus = [0, true]", "x.toml:2: decode.cpus = true is not allowed", "allowed: a list of integers"),
        (
            "[decode]\nkv_bytes = true",
            "x.toml:2: decode.kv_bytes = true is not allowed",
            "allowed: auto or a size such as 256MiB",
        ),
        ("[slo]\nttft_p95 = true", "x.toml:2: slo.ttft_p95 = true is not allowed", "allowed: a duration such as 30s"),
        ("[slo]\nttft_p95 = inf", "x.toml:2: slo.ttft_p95 = inf is not allowed", "allowed: a duration such as 30s"),
        ("[decode]\nkv_low = nan", "x.toml:2: decode.kv_low = nan is not allowed", "allowed: 0.05..1"),
        ("[decode]\nprefix_cache = 1", "x.toml:2: decode.prefix_cache = 1 is not allowed", "allowed: true | false"),
        ("version = 2", "x.toml:1: version = 2 is out of range", "allowed: 1"),
    ],
)
def test_a_problem_has_its_place_and_what_is_right(text: str, message: str, help: str) -> None:
    assert (message, help) in problems(text)


def test_a_duration_that_is_none_says_what_one_is() -> None:
    ((message, help),) = problems(BASE + "[slo]\nttft_p95 = '3 parsecs'")
    assert message.startswith('x.toml:6: slo.ttft_p95 = "3 parsecs" is not allowed')
    assert help == "allowed: a duration such as 30s"


def test_all_problems_are_listed_in_the_order_of_the_file() -> None:
    found = problems(BASE + "kv_hihg = 1\nmax_running = 0\n[router]\nprot = 1\n", "hybrid.treshold_tokens=1")
    assert [message for message, _ in found] == [
        "--set hybrid.treshold_tokens is not a key",
        "x.toml:5: decode.kv_hihg is not a key",
        "x.toml:6: decode.max_running = 0 is out of range",
        "x.toml:8: router.prot is not a key",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE + "kv_low = 0.95", "x.toml:5: decode: kv_low (0.95) must be under kv_high (0.92)"),
        (BASE + "gpus = [0, 1]\ncpus = [0]", "x.toml:5: decode: give gpus or cpus, not both"),
        ("[prefill]\nworkers = 1\n[decode]", "prefill.workers and decode.workers go together"),
        ("", "no workers"),
    ],
)
def test_keys_that_do_not_go_together(text: str, message: str) -> None:
    ((found, _),) = problems(text)
    assert message in found


def test_an_open_host_needs_a_key_file() -> None:
    ((message, help),) = problems(BASE + "[router]\nhost = '0.0.0.0'")
    assert message.startswith("x.toml:6: router.host = '0.0.0.0'")
    assert "0600" in help
    load(write(BASE + "[router]\nhost = '0.0.0.0'\napi_key_file = 'key'"))


@pytest.mark.parametrize(
    ("name", "text", "place"), [("a.toml", "a = 1\nb = = 2", "a.toml:2"), ("a.yaml", "a: [1\nb: 2", "a.yaml:2")]
)
def test_a_syntax_error_has_a_line(name: str, text: str, place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        load(write(text, name))


def test_yaml_is_the_same_model_with_the_same_places() -> None:
    with pytest.raises(ProfileErrors) as caught:
        load(write("decode:\n  workers: 1\n  kv_hihg: 1\nprefill: {workers: 1}\n", "y.yaml"))
    assert caught.value.problems[0].message == "y.yaml:3: decode.kv_hihg is not a key"
    assert load(write("decode: {workers: 1}\nprefill: {workers: 1}\n", "y.yaml")).config.name == "y"


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer sets one key more than the one above it, so that each shows once."""
    write("[decode]\nworkers = 1\nmax_running = 11\nqueue_high = 11\nqueue_low = 5\nidle_swap_s = 11\n", "base.toml")
    write("extends = 'base.toml'\n[prefill]\nworkers = 1\n[decode]\nqueue_high = 12\nidle_swap_s = 12\nqueue_low = 6\n")
    monkeypatch.setenv("PDCTL__DECODE__IDLE_SWAP_S", "13")
    monkeypatch.setenv("PDCTL__DECODE__QUEUE_LOW", "7")
    monkeypatch.setenv("PDCTL_PORT", "tcp://10.0.0.1:8000")  # what Kubernetes sets; not for us
    loaded = load("x.toml", sets=["decode.queue_low=8"], flags={"name": "flagged"})

    decode = loaded.config.decode
    assert (decode.max_running, decode.queue_high, decode.idle_swap_s, decode.queue_low) == (11, 12, 13, 8)
    assert loaded.config.name == "flagged"
    said = {
        key: str(loaded.origin(("decode", key))) for key in ("max_running", "queue_high", "idle_swap_s", "queue_low")
    }
    assert said == {
        "max_running": "base.toml:3",
        "queue_high": "x.toml:5",
        "idle_swap_s": "PDCTL__DECODE__IDLE_SWAP_S",
        "queue_low": "--set",
    }
    assert str(loaded.origin(("decode", "kv_low"))) == "default"
    assert str(loaded.origin(("name",))) == "--name"


def test_a_name_that_is_nearly_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCTL_ROUTER__PORT", "9000")
    with pytest.raises(ConfigError, match="PDCTL_ROUTER__PORT is not read") as caught:
        load(write(BASE))
    assert caught.value.help.startswith("PDCTL__ROUTER__PORT")
    monkeypatch.delenv("PDCTL_ROUTER__PORT")
    monkeypatch.setenv("PDCTL__ROUTER__PORT", "9000")
    assert load(write(f"{BASE}[router]\nport = 8001\n")).config.router.port == 9000


def test_set_is_over_flags() -> None:
    assert load(write(BASE), sets=["name=b"], flags={"name": "a"}).config.name == "b"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1),
        ("a.b=[0, 1]", [0, 1]),
        ("a.b=x/y", "x/y"),
        ("a.b='1'", "1"),
        ("a.b=true", True),
        ("a.b=", ""),
        ("a.b=2026-01-01", "2026-01-01"),
        ("a.b=07:30:00", "07:30:00"),
    ],
)
def test_set_takes_toml_values_and_bare_words(text: str, value: Any) -> None:
    assert parse_set(text) == (("a", "b"), value)


def test_extends_in_a_circle_or_to_nowhere() -> None:
    write("extends = 'x.toml'", "y.toml")
    with pytest.raises(ConfigError, match="circle"):
        load(write("extends = 'y.toml'"))
    with pytest.raises(ConfigError, match=r"x.toml:1: extends 'nowhere': there is no profile 'nowhere'"):
        load(write("extends = 'nowhere'"))


def test_where_a_bare_name_is_looked_for(folder: Path) -> None:
    folders = [folder, folder / "profiles", folder / "config/pdctl/profiles"]
    for one in reversed(folders):
        one.mkdir(parents=True, exist_ok=True)
        (one / "demo.toml").write_text(BASE)
        assert find("demo").absolute() == one / "demo.toml"


def test_an_unknown_name_gets_close_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        find("colocatd")
    assert caught.value.help == "did you mean colocated?"


def test_the_name_is_the_file_name_unless_said() -> None:
    assert load(write(BASE, "mine.toml")).config.name == "mine"
    assert load(write("name = 'other'\n" + BASE, "mine.toml")).config.name == "other"


@pytest.mark.parametrize("name", ["demo", "colocated", "1p1d-gpu", "2p2d-gpu"])
def test_shipped_profiles_are_valid_and_say_when_to_use_them(name: str) -> None:
    loaded = load(name)
    assert loaded.config.name == name
    assert len(purpose(available()[name])) > 80


def test_difference_names_the_keys() -> None:
    one, other = load(write(BASE)).config, load(write(BASE), sets=["router.port=1", "decode.cpus=[1]"]).config
    assert difference(one, other.model_dump(mode="json")) == [("decode.cpus", [], [1]), ("router.port", 8000, 1)]


def test_every_key_says_what_it_takes() -> None:
    assert keys()["decode", "kv_high"].allowed == "0.05..1"
    assert keys()["transfer", "ring_bytes"].allowed == "a size such as 256MiB"
    assert all(key.allowed for key in keys().values())
