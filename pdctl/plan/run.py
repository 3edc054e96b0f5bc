"""`pdctl plan`: where its numbers come from, and what it says."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pdctl.bench import results
from pdctl.bench.traces import MOONCAKE_BLOCK, Recorded
from pdctl.bench.traces import read as read_trace
from pdctl.exits import UsageError
from pdctl.plan import check, words
from pdctl.plan.arithmetic import best_ratio, rates
from pdctl.plan.fit import fit
from pdctl.plan.loads import Arrival, Lengths
from pdctl.plan.roofline import estimate
from pdctl.plan.search import Found, Load, Search
from pdctl.plan.sim import FRESH, Sizes
from pdctl.plan.stages import Stages, from_rates
from pdctl.plan.tally import Slo
from pdctl.profile import load as load_profile
from pdctl.render import note, print_json
from server.config import Config

# What the server takes where the profile says "auto" on a CPU.
CPU_TOKENS, CPU_LOCAL_PREFILL = 256, 32


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line."""

    profile: str | None = None
    prompt: int = 0
    output: int = 0
    spread: float = 0.0
    burst: float = 1.0
    rate: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    stages: Path | None = None
    trace: Path | None = None
    model: str = "llama-3.1-8b"
    device: str = "h200"
    num_devices: int = 0
    thresholds: tuple[int, ...] = ()
    link_bytes_s: float | None = None
    count: int = 400


def stages_of(asked: Asked) -> Stages:
    """Given outright, else measured, else estimated."""
    if asked.prefill_tok_s or asked.decode_tok_s:
        stages = from_rates(asked.prefill_tok_s, asked.decode_tok_s)
    elif asked.stages is not None:
        stages = from_file(asked.stages)
    else:
        stages = estimate(asked.model, asked.device)
    return stages.with_link(asked.link_bytes_s, None)


def from_file(file: Path) -> Stages:
    """A bench result with a calibration, or a stage model as `plan --json` prints it."""
    value = results.read(file)
    if "calibration" in value:
        return fit(value["calibration"], file.name)
    if isinstance(value.get("stages"), dict):
        return Stages.from_json(value["stages"])
    raise UsageError(f"{file} holds neither a calibration nor stages", help="pdctl bench --calibrate -o RESULT.json")


def plan(asked: Asked, *, as_json: bool) -> int:
    config = load_profile(asked.profile).config if asked.profile else _default()
    stages, load = stages_of(asked), _load(asked)
    slo = Slo(
        config.slo.ttft_p95 if asked.ttft_s is None else asked.ttft_s,
        config.slo.tpot_p95 if asked.tpot_s is None else asked.tpot_s,
    )
    ratio = best_ratio(rates(stages, load.lengths.prompt, load.lengths.output))
    devices = asked.num_devices or ratio.prefill + ratio.decode
    # More devices serve the same number in less time: without more requests a growing queue would not be seen.
    sizes = replace(sizes_of(config, stages), prefix_cache=load.has_prefixes)
    if asked.profile:  # without one, a plan says what it should be
        sizes = replace(sizes, queue_high=config.router.queue_high)
    search = Search(stages, load, slo, sizes, count=max(asked.count, asked.count * devices // 4))
    found = search.compare(devices, asked.thresholds or _thresholds(load), note)
    value = _value(asked, search, found, slo, stages)
    if as_json:
        print_json(value)
    else:
        _print(value, search, found)
    return 0


def _load(asked: Asked) -> Load:
    if asked.trace is not None:
        trace = tuple(_arrival(r) for r in read_trace(asked.trace, asked.count))
        prompt = round(sum(a.prompt for a in trace) / len(trace))
        output = round(sum(a.output for a in trace) / len(trace))
        return Load(Lengths(prompt, output), asked.rate, trace)
    if asked.prompt < 1 or asked.output < 1:
        raise UsageError("a plan needs --prompt and --output (tokens), or --trace FILE")
    return Load(Lengths(asked.prompt, asked.output, asked.spread), asked.rate, burst=asked.burst)


def _arrival(recorded: Recorded) -> Arrival:
    prefix = tuple((1 + name % (FRESH - 1), MOONCAKE_BLOCK) for name in recorded.prefix)
    return Arrival(recorded.at, recorded.prompt, recorded.output, prefix)


def _thresholds(load: Load) -> tuple[int, ...]:
    """A hybrid makes sense where lengths differ: below half of a mean prompt, and below a whole one."""
    has_spread = load.lengths.spread > 0 or len({a.prompt for a in load.trace}) > 1
    return (max(1, load.lengths.prompt // 2), load.lengths.prompt) if has_spread else ()


def sizes_of(config: Config, stages: Stages) -> Sizes:
    """As the profile says; where it says "auto", what the stage model was measured with."""
    on_cpu = stages.chunk_tokens <= CPU_TOKENS
    pool = config.prefill
    budget = pool.token_budget if isinstance(pool.token_budget, int) else (CPU_TOKENS if on_cpu else 2048)
    local = config.decode.prefill_tokens
    return Sizes(
        token_budget=budget,
        chunk_tokens=pool.chunk_tokens if isinstance(pool.chunk_tokens, int) else min(budget, stages.chunk_tokens),
        max_seqs=pool.max_seqs,
        max_running=config.decode.max_running,
        local_prefill_tokens=local if isinstance(local, int) else (CPU_LOCAL_PREFILL if on_cpu else 256),
        tpot_objective_s=0.0 if isinstance(local, int) else config.slo.tpot_p95,
        block_size=config.model.block_size,
        prefill_queue_high=config.prefill.queue_high,
        rest_s=config.hybrid.rest_s,
    )


def _value(asked: Asked, search: Search, found: list[Found], slo: Slo, stages: Stages) -> dict[str, Any]:
    ratio, rates, lengths = search.ratio(), search.rates, search.load.lengths
    needed = _needed(asked.rate, found)
    return {
        "version": 1,
        "ratio": {"prefill": ratio.prefill, "decode": ratio.decode},
        "rates": {"prefill": rates.prefill, "decode": rates.decode, "colocated": rates.colocated},
        "arithmetic": words.arithmetic(rates, ratio, lengths.prompt, lengths.output),
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
        "layouts": [
            {
                **asdict(f.layout),
                "devices": f.layout.num_devices,
                "goodput": round(f.rate, 4),
                "goodput_per_device": round(f.per_device, 4),
                "at_that_rate": asdict(f.summary),
            }
            for f in found
        ],
        "best": str(found[0].layout),
        "verdict": words.verdict(found, slo),
        "devices_needed": needed,
        "queue": words.queue(found[0], search.sizes.queue_high),
        "sensitivity": _sensitivity(search),
        "stages": stages.to_json(),
    }


def _needed(rate: float, found: list[Found]) -> int | None:
    """Devices for the rate asked for, in the best layout's proportion."""
    if not rate or not found[0].per_device:
        return None
    return max(1, -int(-rate / found[0].per_device // 1))


def _sensitivity(search: Search) -> list[dict[str, Any]]:
    """The ratio when prompts or answers are half or twice as long: whether it would have to be changed often."""
    lengths, rows = search.load.lengths, []
    for prompt, output in ((0.5, 1), (2, 1), (1, 0.5), (1, 2)):
        changed = replace(
            lengths, prompt=max(1, round(lengths.prompt * prompt)), output=max(1, round(lengths.output * output))
        )
        other = Search(search.stages, Load(changed), search.slo, search.sizes).ratio()
        rows.append({"prompt": changed.prompt, "output": changed.output, "ratio": str(other)})
    return rows


def _print(value: dict[str, Any], search: Search, found: list[Found]) -> None:
    print(f"stages: {search.stages.source}")
    print(value["arithmetic"])
    print()
    print(words.layouts(found))
    print("goodput: the highest requests/s of which nine in ten meet TTFT and TPOT; times in ms at that rate")
    print(f"\n{value['verdict']}")
    if value["devices_needed"]:
        print(f"{search.load.rate:g} requests/s need {value['devices_needed']} devices as {value['best']}")
    if value["queue"]:
        print(value["queue"])
    lengths = "; ".join(f"{s['prompt']}/{s['output']}: {s['ratio']}" for s in value["sensitivity"])
    print(f"ratio at other lengths (prompt/output): {lengths}")


def check_result(file: Path, stages_file: Path | None, *, as_json: bool) -> int:
    result = results.read(file)
    stages = from_file(stages_file or file)
    sizes = Sizes(**result["sizes"]) if "sizes" in result else sizes_of(_default(), stages)
    graded = check.grade(result, stages, sizes)
    if as_json:
        print_json(check.to_json(graded, stages.source))
    else:
        print(check.show(graded))
    return 0


def _default() -> Config:
    return Config.model_validate({"prefill": {"workers": 1}, "decode": {"workers": 1}})
