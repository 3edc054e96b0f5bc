"""`pdctl bench`: from the command line to a result, a report and an exit code."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from pdctl.bench import compare, criteria, results, term
from pdctl.bench.cells import Key
from pdctl.bench.loads import VOCAB, Loop, Shape
from pdctl.bench.report import html
from pdctl.bench.session import Plan, Session
from pdctl.bench.target import Mode, check_modes, parse_mode
from pdctl.exits import Exit, UsageError
from pdctl.render import note, print_json

DEFAULT_MODES = ("colocated", "pd=demo")
PROMPTS, CONCURRENCIES = (128, 1024, 4096), (1, 2, 4, 8, 16, 32)
# All of it in about four minutes of two slow cores (140 prompt tokens/s each), three starts among them.
QUICK_PROMPTS, QUICK_OUTPUT, QUICK_CONCURRENCIES = (48, 96, 192), 12, (1, 4)
QUICK_LIMIT_S = 2.0  # of new requests in a cell and round
QUICK_WITHIN_S = 285.0  # and 15 s for the last stack to go down: five minutes


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line. Empty tuples and zeros: the defaults, or the quick ones."""

    root: Path
    modes: tuple[str, ...] = ()
    prompts: tuple[int, ...] = ()
    mixes: tuple[tuple[int, ...], ...] = ()
    output: int = 0
    concurrencies: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    burst: float = 1.0
    trace: Path | None = None
    shared: float = 0.0
    turns: int = 1
    rounds: int = 0
    requests: int = 0
    limit_s: float | None = None
    within_s: float | None = None
    ttft_s: float = 0.8
    tpot_s: float = 0.04
    budgets: tuple[int, ...] = ()
    is_quick: bool = False
    is_calibrating: bool = False
    max_len: int = 0
    key: str = "none-needed"
    model: str = ""
    seed: int = 1
    vocab: int = VOCAB

    @property
    def is_plainly_quick(self) -> bool:
        """--quick, and nothing of what it would do was asked for otherwise."""
        sizes = (self.prompts, self.mixes, self.output, self.concurrencies, self.rates, self.trace, self.budgets)
        more = (self.rounds, self.requests, self.limit_s, self.is_calibrating)
        return self.is_quick and not any((*sizes, *more))


def plan_of(asked: Asked) -> Plan:
    modes = [parse_mode(text) for text in asked.modes or DEFAULT_MODES]
    modes = [m for mode in modes for m in _swept(mode, asked.budgets)]
    check_modes(modes)
    quick = asked.is_quick
    return Plan(
        modes=tuple(modes),
        keys=tuple(_keys(asked)),
        rounds=asked.rounds or (2 if quick else 3),
        requests=asked.requests or (3 if quick else 16),
        waves=1 if quick else 2,
        limit_s=asked.limit_s if asked.limit_s is not None else (QUICK_LIMIT_S if quick else 0.0),
        within_s=asked.within_s if asked.within_s is not None else (QUICK_WITHIN_S if asked.is_plainly_quick else 0.0),
        ttft_s=asked.ttft_s,
        tpot_s=asked.tpot_s,
        is_calibrating=asked.is_calibrating,
        max_len=asked.max_len,
        root=asked.root,
        key=asked.key,
        model=asked.model,
        seed=asked.seed,
        vocab=asked.vocab,
    )


def mix_of(text: str) -> tuple[int, ...]:
    """ "128,128,1024": of three prompts two are short."""
    lengths = tuple(int(word) for word in text.split(",") if word.strip().isdecimal())
    if len(lengths) != text.count(",") + 1 or min(lengths) < 1:
        raise UsageError(f"--mix {text} is not like 128,128,128,128,1024")
    return lengths


def rates_of(texts: Sequence[str]) -> tuple[float, ...]:
    """ "2" is one rate, "1..8" doubles from one end to the other: 1, 2, 4, 8."""
    rates: list[float] = []
    for text in texts:
        low, _, high = text.partition("..")
        try:
            rate, top = float(low), float(high or low)
        except ValueError as error:
            raise UsageError(f"--rate {text} is not like 2 or 1..16") from error
        if not 0 < rate <= top:
            raise UsageError(f"--rate {text}: rates are above 0, the lower one first")
        while rate < top:
            rates.append(rate)
            rate *= 2
        rates.append(top)
    return tuple(rates)


def _swept(mode: Mode, budgets: tuple[int, ...]) -> list[Mode]:
    """A colocated profile at several token budgets: its frontier, not its default, is what has to be beaten."""
    if mode.is_url or not mode.name.startswith("colocated") or not budgets:
        return [mode]
    sets = [(b, (*mode.sets, f"colocated.token_budget={b}", f"colocated.chunk_tokens={b}")) for b in budgets]
    return [Mode(f"{mode.name}-{b}", mode.what, more, mode.name) for b, more in sets]


def _keys(asked: Asked) -> list[Key]:
    output = asked.output or (QUICK_OUTPUT if asked.is_quick else 64)
    if not 0 <= asked.shared <= 1:
        raise UsageError("--shared is a share, 0 to 1")
    prompts = asked.prompts or (() if asked.mixes else QUICK_PROMPTS if asked.is_quick else PROMPTS)
    shapes = [Shape(prompt, output, asked.shared, asked.turns, asked.vocab) for prompt in prompts]
    shapes += [Shape(round(fmean(m)), output, vocab=asked.vocab, mix=m) for m in asked.mixes]
    if asked.trace is not None:
        return [Key(Shape(0, 0), Loop(rate=r, trace=asked.trace)) for r in asked.rates or (0.0,)]
    if asked.rates and not asked.concurrencies:
        loops = [Loop(rate=rate, burst=asked.burst) for rate in asked.rates]
    else:
        users = asked.concurrencies or (QUICK_CONCURRENCIES if asked.is_quick else CONCURRENCIES)
        loops = [Loop(concurrency=n) for n in users] + [Loop(rate=r, burst=asked.burst) for r in asked.rates]
    return [Key(shape, loop) for shape in shapes for loop in loops]


def bench(asked: Asked, *, fail_on: tuple[str, ...], output: Path | None, report: Path | None, as_json: bool) -> int:
    wanted = [criteria.parse(text) for text in fail_on]
    for option, file in (("-o", output), ("--report", report)):
        _check_target(option, file)
    plan = plan_of(asked)
    progress = Progress()
    # As Ctrl-C: whatever stack is up goes down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.TERMINATED))
    keep: Callable[[dict[str, Any]], None] = partial(_write, output) if output is not None else _forget
    try:
        result = Session(plan, progress.show, keep).run()
    finally:
        progress.clear()
    result["verdict"] = compare.verdict(result)
    keep(result)
    if output is not None:
        note(f"result: {output}")
    if report is not None:
        _replace(report, html(result))
        note(f"report: {report}")
    if as_json:
        print_json(result)
    else:
        tell(result)
    return _code(result, wanted)


def _check_target(option: str, file: Path | None) -> None:
    """Before anything is measured for it. Raises UsageError."""
    if file is None:
        return
    try:
        is_folder, has_folder, may_write = file.is_dir(), file.parent.is_dir(), os.access(file.parent, os.W_OK)
        may_write |= _is_in_place(file) and os.access(file, os.W_OK)
    except OSError as error:
        raise UsageError(f"{option} {file}: {error.strerror}") from error
    if is_folder:
        raise UsageError(f"{option} {file} is a folder", help=f"name a file in it, such as {file / 'result'}")
    if not has_folder:
        raise UsageError(f"{option} {file}: there is no folder {file.parent}")
    if not may_write:
        raise UsageError(f"{option} {file}: {file.parent} may not be written to")


def _write(file: Path, result: dict[str, Any]) -> None:
    _replace(file, json.dumps(result, indent=1) + "\n")


def _replace(file: Path, text: str) -> None:
    """All of it or nothing: who reads it meanwhile finds a whole one."""
    if _is_in_place(file):
        file.write_text(text, encoding="utf-8")
        return
    beside = file.with_name(file.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def _is_in_place(file: Path) -> bool:
    """A device or a link, such as /dev/stdout: a file must not take its place."""
    return file.is_symlink() or (file.exists() and not file.is_file())


def _forget(result: dict[str, Any]) -> None: ...


def tell(result: dict[str, Any]) -> None:
    print(compare.show(result))
    print()
    print(term.plots(result))
    print()
    for line in result["verdict"]:
        print(line)


def _code(result: dict[str, Any], wanted: list[criteria.Criterion]) -> int:
    """8 for a criterion, and for a bench in which nothing was served."""
    missed = [line for criterion in wanted for line in criterion.missed(result)]
    missed += [
        f"{c['mode']} {c['prompt']}/{c['output']}: no request came back ({c['first_error']})"
        for c in result["cells"]
        if not c["requests"]
    ]
    for line in missed:
        note(f"missed: {line}")
    return Exit.MISSED if missed else Exit.OK


def compare_files(first: Path, second: Path, *, fail_on: tuple[str, ...], as_json: bool) -> int:
    """`fail_on` looks at the second."""
    wanted = [criteria.parse(text) for text in fail_on]
    a, b = results.read(first, "bench"), results.read(second, "bench")
    found = compare.between(a, b)
    if as_json:
        quantities = ("ttft_ms", "tpot_ms", "itl_ms", "requests_s", "goodput")
        cells = [
            {"mode": p.base["mode"], "prompt": p.base["prompt"], "concurrency": p.base["concurrency"]}
            | {q: {"before": p.base[q], "after": p.other[q], "change": p.change(q)} for q in quantities}
            for p in found
        ]
        print_json({"version": 1, "cells": cells})
    else:
        print(compare.show_between(found))
    return _code(b, wanted)


class Progress:
    """One line on stderr, redrawn on a terminal; a line a cell elsewhere."""

    def __init__(self) -> None:
        self._is_tty = sys.stderr.isatty()
        self._started = time.monotonic()

    def show(self, done: int, total: int, what: str) -> None:
        gone = time.monotonic() - self._started
        left = f", about {gone / done * (total - done) / 60:.0f} min left" if done else ""
        if not self._is_tty:
            note(f"[{done}/{total}] {what}{left}")
            return
        filled = round(24 * done / max(1, total))
        print(
            f"\r\x1b[K{'█' * filled}{'░' * (24 - filled)} {done}/{total} {what}{left}",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        if self._is_tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
