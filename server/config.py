"""The profile as the server sees it: frozen, complete and validated before any process starts.

`pdctl.profile` reads TOML, merges and turns errors into file and line; this module says what is allowed. The supervisor
resolves every "auto" that it can (`Config.resolved`) and writes the result as JSON for the workers, so that no process
decides for itself.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_SIZE = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_CONDITION = re.compile(
    r"(?P<metric>ttft|tpot)_p(?P<percentile>[0-9]{2}) *> *(?:(?P<factor>[0-9]*\.?[0-9]+) *\* *)?"
    r"(?:slo\.(?P<slo>ttft_p95|tpot_p95)|(?P<time>[0-9]*\.?[0-9]+ *(?:ms|s|m)))"
)
_TIME = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_bytes(value: Any) -> Any:
    """ "256MiB" -> 268435456. Numbers pass; anything else is left for pydantic to refuse."""
    return int(_scaled(value, _SIZE, "a size such as 256MiB")) if isinstance(value, str) else value


def parse_seconds(value: Any) -> Any:
    """ "250ms" -> 0.25. Numbers pass as seconds."""
    return _scaled(value, _TIME, "a duration such as 30s or 250ms") if isinstance(value, str) else value


def _scaled(text: str, units: dict[str, Any], example: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not {example}")
    return float(match[1]) * float(units[match[2].lower()])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0)]
Auto = Literal["auto"]
Role = Literal["prefill", "decode", "colocated"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "colocated")
# Measured on one AVX-512 core: prefill is fastest at 128-256 tokens a forward (docs/benchmarks.md).
CPU_TOKENS = 256
GPU_BUDGET = 2048
MAX_WORKERS = 1024  # of a pool
GPU_CHUNK = 1024
STAGING_CHUNKS = 16
AutoBytes = Auto | Bytes
Origin = Annotated[str, Field(pattern=r"^https?://[^/*?#\s]+$")]
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
Share = Annotated[float, Field(ge=0.05, le=1.0)]


class Section(BaseModel):
    """Every table of the profile: unknown keys are errors, values never change after loading."""

    # strict: TOML and YAML say what is a number, and `port = true` is none.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(Section):
    path: str = Field("smollm2-135m", description="hub id, local folder, smollm2-135m (embedded) or dummy:<config>")
    served_name: list[str] = Field(default_factory=list, description="names clients use; default: last part of path")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_len: int = Field(0, ge=0, description="longest prompt + output in tokens; 0 = the model's own limit")
    block_size: int = Field(16, ge=1, le=256, description="token slots of a KV block")


class Router(Section):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 picks a free one")
    api_key_file: str | None = None
    admin_key_file: str | None = None
    view_key_file: str | None = Field(None, description="keys that may read the admin API and change nothing")
    policy: Literal["round-robin", "least-loaded", "kv-aware"] = "kv-aware"
    queue_high: int = Field(50, ge=1, le=4096, description="sequences without a first token before clients get 429")
    request_timeout: Seconds = 600.0
    worker_wait: Seconds = Field(
        30.0, description="how long a request waits for a worker that is coming back before it gets 503; 0: not at all"
    )
    key_max_requests: int = Field(
        0, ge=0, le=65536, description="in flight by API key; each counts as its prompts times n; 0: any number"
    )
    cors_origins: list[Origin] = Field(
        default_factory=list, description="origins whose pages may call, exactly as a browser names them"
    )
    keepalive_s: Seconds = 0.0


class Pool(Section):
    """Keys that every worker pool has. `gpus` or `cpus` hold workers x n device numbers, in worker order."""

    workers: int = Field(0, ge=0, le=MAX_WORKERS)
    gpus: list[int] = Field(default_factory=list)
    cpus: list[int] = Field(default_factory=list)
    token_budget: Annotated[int, Field(ge=64, le=65536)] | Auto = Field(
        "auto", description="tokens of one step; auto: 2048, 256 on a CPU"
    )
    chunk_tokens: Annotated[int, Field(ge=16, le=65536)] | Auto = Field(
        "auto", description="prompt tokens of one forward"
    )
    kv_bytes: AutoBytes = "auto"
    host_swap_bytes: Bytes = Field(0, description="host memory for KV that the device has no room for; 0: none")
    prefix_cache: bool = True
    env: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _devices(self) -> Self:
        devices = self.gpus or self.cpus
        if self.gpus and self.cpus:
            raise ValueError("give gpus or cpus, not both")
        if self.workers and devices and len(devices) % self.workers:
            raise ValueError(f"{len(devices)} devices cannot be shared out evenly among {self.workers} workers")
        if self.host_swap_bytes and not self.prefix_cache:
            raise ValueError("host_swap_bytes needs prefix_cache = true: swapped blocks are found by their prefix")
        return self

    @property
    def budget(self) -> int:
        """token_budget, "auto" resolved by device."""
        if isinstance(self.token_budget, int):
            return self.token_budget
        return GPU_BUDGET if self.gpus else CPU_TOKENS

    @property
    def chunk(self) -> int:
        """chunk_tokens, "auto" resolved by device, and never more than a step's budget."""
        auto = GPU_CHUNK if self.gpus else CPU_TOKENS
        return min(self.budget, auto if self.chunk_tokens == "auto" else self.chunk_tokens)

    def devices_of(self, index: int) -> tuple[list[int], list[int]]:
        """(gpus, cpus) of worker `index`."""
        share = max(1, len(self.gpus or self.cpus) // max(1, self.workers))
        part = slice(index * share, (index + 1) * share)
        return self.gpus[part], self.cpus[part]


class Prefill(Pool):
    max_seqs: int = Field(16, ge=1, le=4096, description="prompts computed at once")
    queue_high: int = Field(8, ge=1, le=4096)


class Decode(Pool):
    max_running: int = Field(64, ge=1, le=4096)
    kv_low: Share = 0.80
    kv_high: Share = 0.92
    queue_low: int = Field(2, ge=0, le=4096)
    queue_high: int = Field(32, ge=0, le=4096)
    prefill_tokens: Annotated[int, Field(ge=0, le=2048)] | Auto = "auto"
    idle_swap_s: Annotated[int, BeforeValidator(parse_seconds), Field(ge=0, le=86400)] = Field(
        30, description="a sequence whose client does not read gives its blocks away after so long; 0: it runs on"
    )

    @model_validator(mode="after")
    def _marks(self) -> Self:
        if self.kv_low >= self.kv_high:
            raise ValueError(f"kv_low ({self.kv_low}) must be under kv_high ({self.kv_high})")
        if self.queue_low >= self.queue_high:
            raise ValueError(f"queue_low ({self.queue_low}) must be under queue_high ({self.queue_high})")
        return self


class Colocated(Pool):
    max_running: int = Field(64, ge=1, le=4096)


class Transfer(Section):
    backend: Literal["auto", "nixl", "tcp"] = "auto"
    host: str = Field("", description="address that a worker offers for KV; empty: that of its control connection")
    chunk_tokens: int = Field(64, ge=1, le=8192, description="tokens of one push, a multiple of model.block_size")
    max_inflight: int = Field(16, ge=1, le=256, description="chunks under way to one peer")
    ring_bytes: Bytes = 256 * 2**20
    checksum: Literal["full", "off"] = "full"
    compression: Literal["none", "zstd", "fp8"] = "none"
    timeout: Seconds = 30.0
    latency_warn: Seconds = 0.05

    def staging_bytes(self, block_size: int, block_bytes: int) -> int:
        """Of chunks on their way out as copies, gathered or encoded, to all peers together."""
        return STAGING_CHUNKS * max(1, self.chunk_tokens // block_size) * block_bytes


class Host(Section):
    """One machine of several. `pdctl up` of the same profile on each starts what is its own."""

    address: str = Field(min_length=1, description="by which the others reach it, an IP or a name")
    port: int = Field(7400, ge=1, le=65000, description="of its first worker's control connection; others count on")
    workers: list[str] = Field(default_factory=list, description="names, such as decode-0")
    router: bool = False

    def control(self, worker: str) -> str:
        """Where that worker of this host listens."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp:{address}:{self.port + self.workers.index(worker)}"


class Hybrid(Section):
    threshold_tokens: Annotated[int, Field(ge=0)] | Auto = Field(
        256,
        description="shorter uncached prompts stay on one worker; 0: all cross, while there is a decode worker",
    )
    rest_s: Seconds = Field(
        1.0,
        description="a prefill worker that nobody's prompt crossed from for so long does whole short ones; 0: never",
    )
    ahead_s: Seconds = Field(
        0.25,
        description="a prompt that has waited so long for a full decode pool is decoded by prefill meanwhile; 0: never",
    )


class Slo(Section):
    ttft_p95: Seconds = 0.8
    tpot_p95: Seconds = 0.04


class Supervise(Section):
    ready_timeout: Seconds = 1200.0
    stop_timeout: Seconds = 30.0
    restart: Literal["no", "on-failure", "always"] = "on-failure"
    max_restarts: int = Field(3, ge=0)
    backoff: str = "2s..60s"

    @property
    def backoff_s(self) -> tuple[float, float]:
        low, _, high = self.backoff.partition("..")
        return float(parse_seconds(low)), float(parse_seconds(high or low))

    @model_validator(mode="after")
    def _backoff(self) -> Self:
        low, high = self.backoff_s
        if low > high:
            raise ValueError("backoff must be LOW..HIGH, such as 2s..60s")
        return self


class AutoRevert(Section):
    """Takes a change back by itself when the condition holds within the time."""

    condition: str = Field("ttft_p95 > 2 * slo.ttft_p95", alias="if")
    within: Seconds = 60.0

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if _CONDITION.fullmatch(self.condition) is None:
            raise ValueError(f"{self.condition!r} is not a condition such as 'ttft_p95 > 2 * slo.ttft_p95'")
        return self

    @property
    def metric(self) -> str:
        return self._parts()["metric"]

    @property
    def percentile(self) -> int:
        return int(self._parts()["percentile"])

    def limit_s(self, slo: Slo) -> float:
        parts = self._parts()
        objective = getattr(slo, parts["slo"]) if parts["slo"] else parse_seconds(parts["time"])
        return float(parts["factor"] or 1.0) * float(objective)

    def _parts(self) -> dict[str, str]:
        match = _CONDITION.fullmatch(self.condition)
        assert match is not None, "checked when it was read"
        return match.groupdict(default="")


class Tune(Section):
    """Limits on live changes. None: no limit."""

    read_only: bool = Field(False, description="refuse every live change")
    min_interval: Seconds | None = Field(None, description="between two changes of one knob")
    max_step: Annotated[float, Field(gt=0, le=10)] | None = Field(None, description="share of the value, 0.5 = +-50 %")
    auto_revert: AutoRevert | None = None


class Tui(Section):
    refresh: Seconds = 1.0
    theme: Literal["dark", "light", "cb-safe", "ansi"] = "dark"
    keymap: dict[str, str] = Field(default_factory=dict, description="action id = key")


class WorkerSpec(Section):
    """One worker process, as the supervisor starts it and every other process addresses it."""

    name: str
    role: Role
    index: int
    gpus: list[int]
    cpus: list[int]


class Config(Section):
    """A whole profile. Raises pydantic.ValidationError; `pdctl.profile` maps it to ConfigError."""

    version: int = Field(1, ge=1, le=1)
    name: str = Field("stack", pattern=f"^{NAME}$")
    model: Model = Model()
    router: Router = Router()
    prefill: Prefill = Prefill()
    decode: Decode = Decode()
    colocated: Colocated = Colocated()
    transfer: Transfer = Transfer()
    hybrid: Hybrid = Hybrid()
    slo: Slo = Slo()
    supervise: Supervise = Supervise()
    tune: Tune = Tune()
    tui: Tui = Tui()
    hosts: dict[str, Host] = Field(default_factory=dict, description="machines, by any name; none: this one")
    secret_file: str | None = Field(None, description="the stack's secret, the same file on every machine")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if bool(self.prefill.workers) != bool(self.decode.workers):
            raise ValueError("prefill.workers and decode.workers go together: both above 0, or both 0")
        if not (self.prefill.workers or self.colocated.workers):
            raise ValueError("no workers: set prefill.workers and decode.workers, or colocated.workers")
        if self.transfer.chunk_tokens % self.model.block_size:
            raise ValueError(
                f"transfer.chunk_tokens ({self.transfer.chunk_tokens}) must be a multiple of "
                f"model.block_size ({self.model.block_size})"
            )
        self._check_hosts()
        return self

    def _check_hosts(self) -> None:
        if not self.hosts:
            return
        placed = [name for host in self.hosts.values() for name in host.workers]
        names = {spec.name for spec in self.workers}
        if unknown := [name for name in placed if name not in names]:
            raise ValueError(f"hosts: there is no worker {unknown[0]}; there are {', '.join(sorted(names))}")
        if wrong := sorted(name for name in names if placed.count(name) != 1):
            raise ValueError(f"hosts: {wrong[0]} is on {placed.count(wrong[0])} hosts; each worker is on one")
        if sum(host.router for host in self.hosts.values()) != 1:
            raise ValueError("hosts: set router = true on one of them")
        if self.secret_file is None:
            raise ValueError("hosts need secret_file: a file of mode 0600 with the same line on every machine")

    def host_of(self, worker: str) -> Host | None:
        """None on the one machine that a profile without hosts is for."""
        return next((host for host in self.hosts.values() if worker in host.workers), None)

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        return tuple(self._workers())

    def _workers(self) -> Iterator[WorkerSpec]:
        for role in ROLES:
            pool = self.pool(role)
            for i in range(pool.workers):
                gpus, cpus = pool.devices_of(i)
                yield WorkerSpec(name=f"{role}-{i}", role=role, index=i, gpus=gpus, cpus=cpus)

    def pool(self, role: Role) -> Prefill | Decode | Colocated:
        pools: dict[str, Prefill | Decode | Colocated] = {
            "prefill": self.prefill,
            "decode": self.decode,
            "colocated": self.colocated,
        }
        return pools[role]

    @property
    def served_names(self) -> list[str]:
        return self.model.served_name or [Path(self.model.path).name]
