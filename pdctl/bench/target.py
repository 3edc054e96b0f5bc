"""What is measured: a profile that is brought up for it, or a server that runs already, ours or anyone's.

    profile     demo, ./mine.toml, demo+hybrid.threshold_tokens=512
    address     http://127.0.0.1:8000
    with a name     pd=demo, vllm=http://gpu1:8000

A profile's stack is called bench-NAME, listens on a free port, and is down again when the bench ends, however it ends.
"""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdctl.bench.driver import Server
from pdctl.client import Answered, Client, api_key
from pdctl.down import supervisor_of
from pdctl.exits import Refused, UsageError
from pdctl.profile import load
from pdctl.render import note
from pdctl.rundir import StackDir
from server.config import Config
from server.errors import StartError

UP_TIMEOUT_S = 1800
AUTO_THRESHOLD = 256  # what the router takes for "auto"
_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,40})=(.+)")


@dataclass(frozen=True, slots=True)
class Mode:
    """One side of a comparison."""

    name: str
    what: str  # profile or address
    sets: tuple[str, ...] = ()
    family: str = ""  # of a mode that is one of several budgets: the name they have in common

    @property
    def is_url(self) -> bool:
        return self.what.startswith(("http://", "https://"))


def parse_mode(text: str) -> Mode:
    if text.startswith(("http://", "https://")):
        return Mode(re.sub(r"\W+", "-", text.split("://", 1)[1]).strip("-"), text)
    head, *sets = text.split("+")
    match = _NAME.fullmatch(head)
    name, what = (match[1], match[2]) if match else (Path(head).stem, head)
    return Mode(name, what, tuple(sets))


def check_modes(modes: list[Mode]) -> None:
    """Raises UsageError for two of a name, ConfigError for a profile that does not stand."""
    names = [mode.name for mode in modes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"two modes are called {', '.join(twice)}", help="give one a name: --mode NAME=PROFILE")
    for mode in modes:
        if not mode.is_url:
            load(mode.what, sets=list(mode.sets))


@dataclass(slots=True)
class Target:
    """A mode while it can be reached."""

    mode: Mode
    server: Server
    layout: dict[str, int] | None = None
    sizes: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def num_readers(self) -> int:
        return (self.layout or {}).get("prefill") or (self.layout or {}).get("colocated") or 1

    @property
    def num_writers(self) -> int:
        return (self.layout or {}).get("decode") or (self.layout or {}).get("colocated") or 1

    @property
    def has_pools(self) -> bool:
        return bool((self.layout or {}).get("prefill"))

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.mode.name,
            "family": self.mode.family or self.mode.name,
            "what": self.mode.what,
            "sets": self.mode.sets,
            "layout": self.layout,
            "sizes": self.sizes,
            **self.facts,
        }


class Stage:
    """One managed stack at a time: modes share the devices, that is the point of comparing them."""

    def __init__(self, root: Path, key: str, model: str = "") -> None:
        self._root, self._key, self._model = root, key, model
        self._up: Target | None = None
        self._foreign: dict[str, Target] = {}

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        if self._up is not None:
            name, self._up = self._stack_name(self._up.mode), None
            self._pdctl(["down", name, "--drain", "1s"])

    def has(self, mode: Mode) -> bool:
        """Whether `on` would find it reachable already."""
        return mode.name in self._foreign if mode.is_url else self._up is not None and self._up.mode == mode

    def on(self, mode: Mode) -> tuple[Target, bool]:
        """The mode, reachable; and whether it was started just now."""
        is_new = not self.has(mode)
        if mode.is_url:
            if is_new:
                self._foreign[mode.name] = self._reach(mode)
            return self._foreign[mode.name], is_new
        if self._up is not None and not is_new:
            return self._up, False
        self.clear()
        self._up = self._start(mode)
        return self._up, True

    def _stack_name(self, mode: Mode) -> str:
        return f"bench-{mode.name}"

    def _start(self, mode: Mode) -> Target:
        name = self._stack_name(mode)
        stack_dir = StackDir(self._root / name)
        options = [word for text in ("router.port=0", *mode.sets) for word in ("--set", text)]
        if (stack := stack_dir.read()) is not None and not stack.is_over and supervisor_of(stack).is_alive:
            raise Refused(f"{name} runs already: another bench, or what is left of one", help=f"pdctl down {name}")
        note(f"starting {mode.name} ({mode.what})")
        # Known before it is up: what a start that fails leaves behind is taken down too.
        self._up = Target(mode, Server("", "", ""))
        code = self._pdctl(["up", mode.what, "-d", "-n", name, "--progress", "quiet", *options])
        stack = stack_dir.read()
        if code or stack is None:
            raise StartError(
                f"{mode.name} did not start (pdctl up {mode.what}: exit {code})", help=f"pdctl logs -n {name}"
            )
        key = api_key(stack)
        config = Config.model_validate(stack.profile)
        target = Target(mode, Server(stack.url, key, _model(stack.url, key)), *layout_of(config))
        target.facts = {"model": config.model.path, "dtype": config.model.dtype}
        return target

    def _reach(self, mode: Mode) -> Target:
        url = mode.what.rstrip("/").removesuffix("/v1")
        return Target(mode, Server(url, self._key, self._model or _model(url, self._key)))

    def _pdctl(self, words: list[str]) -> int:
        command = [sys.executable, "-P", "-m", "pdctl", "-q", "--state-dir", str(self._root), *words]
        # What up and down say is of no interest as long as they do what they should.
        done = subprocess.run(command, capture_output=True, text=True, timeout=UP_TIMEOUT_S, check=False)
        if done.returncode:
            note(done.stderr.strip())
        return done.returncode


def _model(url: str, key: str) -> str:
    try:
        data = Client(url, key).get("/v1/models").get("data") or []
        return str(data[0]["id"])
    except (Answered, IndexError, KeyError) as error:
        raise UsageError(f"{url} does not say which model it serves ({error})", help="--model NAME") from error


def layout_of(config: Config) -> tuple[dict[str, int], dict[str, Any]]:
    """For `pdctl plan --check`: what ran, in the planner's words."""
    threshold = config.hybrid.threshold_tokens
    pool = config.prefill if config.prefill.workers else config.colocated
    budget = pool.token_budget if isinstance(pool.token_budget, int) else (2048 if pool.gpus else 256)
    chunk = pool.chunk_tokens if isinstance(pool.chunk_tokens, int) else (1024 if pool.gpus else 256)
    local = config.decode.prefill_tokens
    layout = {
        "prefill": config.prefill.workers,
        "decode": config.decode.workers,
        "colocated": 0 if config.prefill.workers else config.colocated.workers,
        "threshold": (AUTO_THRESHOLD if threshold == "auto" else threshold) if config.prefill.workers else 0,
    }
    sizes = {
        "token_budget": budget,
        "chunk_tokens": min(chunk, budget),
        "max_seqs": config.prefill.max_seqs,
        "max_running": config.decode.max_running,
        "local_prefill_tokens": local if isinstance(local, int) else (256 if pool.gpus else 32),
        "tpot_objective_s": 0.0 if isinstance(local, int) else config.slo.tpot_p95,
        "block_size": config.model.block_size,
        "queue_high": config.router.queue_high,
        "prefill_queue_high": config.prefill.queue_high,
        "rest_s": config.hybrid.rest_s,
    }
    return layout, sizes
