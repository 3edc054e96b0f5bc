"""A stage model from measurements: least squares with no term below zero.

Sources, in a result's "calibration" (written by `pdctl bench`, more of them with --calibrate):

    prefill     [role, tokens, seconds, busy]            a prompt that no other shares its worker with
    decode      [role, batch, context, seconds, busy]    a step: the median gap while `batch` sequences decode together
    transfer    [tokens, bytes, seconds]                 what of a transfer was left when the prompt was read
    grants      seconds                                  from asking for one to having it, two messages

`busy` is the share of the other workers that computed meanwhile: what it costs is fitted first, and taken out.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from pdctl.exits import UsageError
from pdctl.plan.stages import Contention, Stages, StepModel

Terms = tuple[float, float, float]

ROLES = ("prefill", "decode", "colocated")


def nonnegative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares of relative errors, terms >= 0, by coordinate descent (convex, so it ends at the one optimum)."""
    weight = 1 / np.asarray(seconds, dtype=float)
    matrix = np.asarray(rows, dtype=float) * weight[:, None]
    scale = np.where((norm := np.linalg.norm(matrix, axis=0)) > 0, norm, 1.0)
    matrix, target = matrix / scale, np.ones(len(weight))
    terms = np.zeros(matrix.shape[1])
    residual = target.copy()
    for _ in range(20_000):
        change = 0.0
        for j in range(len(terms)):
            column = matrix[:, j]
            new = max(0.0, terms[j] + float(column @ residual))
            residual -= column * (new - terms[j])
            change, terms[j] = max(change, abs(new - terms[j])), new
        if change < 1e-12:
            break
    return [float(x) for x in terms / scale]


def fit(calibration: dict[str, Any], source: str) -> Stages:
    """Raises UsageError when it holds too little. A role without figures takes those of another."""
    chunk = int(calibration.get("chunk_tokens") or 256)
    found = _contention(calibration)
    calibration = {
        **calibration,
        "prefill": _alone(calibration.get("prefill", []), found.read_read, found.read_write),
        "decode": _alone(calibration.get("decode", []), found.write_write, found.write_read),
    }
    writers = {role: terms for role in ROLES if (terms := _decoding(calibration, role))}
    most = min((terms[0] for terms in writers.values()), default=float("inf"))
    readers = {role: terms for role in ROLES if (terms := _reading(calibration, role, chunk, most))}
    if not readers or not writers:
        what = "prompts" if not readers else "decoding"
        raise UsageError(f"{source} holds no calibration of {what}", help="pdctl bench --calibrate -o RESULT.json")
    prefill = _combined(_first(readers, "prefill", "colocated", "decode"), None)
    decode = _combined(_first(readers, "decode", "colocated", "prefill"), _first(writers, "decode", "colocated"))
    colocated = _combined(_first(readers, "colocated", "prefill"), _first(writers, "colocated", "decode"))
    transfer = [(float(t), float(b), float(s)) for t, b, s in calibration.get("transfer", []) if s > 0]
    bytes_s, latency = _link(transfer)
    return Stages(
        prefill,
        decode,
        colocated,
        kv_token_bytes=median([b / t for t, b, _ in transfer]) if transfer else 0.0,
        link_bytes_s=bytes_s,
        link_latency_s=latency,
        router_s=float(calibration.get("router_s") or 0.0),
        hop_s=median(grants) / 2 if (grants := calibration.get("grants")) else 0.0,
        router_busy_s=float(calibration.get("router_busy_s") or 0.0),
        source=source,
        chunk_tokens=chunk,
        max_batch=int(calibration.get("max_batch") or 64),
        contention=found,
    )


def _contention(calibration: dict[str, Any]) -> Contention:
    """While a prefill worker is measured the others write, while a decode worker is they read; the others of a
    colocated one do as it does. What was not measured is as what was."""
    prompts, decoding = calibration.get("prefill", []), calibration.get("decode", [])
    among, beside = longer(prompts, {"colocated"}), longer(prompts, {"prefill"})
    reading = among if among is not None else beside or 0.0, beside if beside is not None else among or 0.0
    among, beside = longer(decoding, {"colocated"}), longer(decoding, {"decode"})
    writing = beside if beside is not None else among or 0.0, among if among is not None else beside or 0.0
    return Contention(*reading, *writing)


def longer(points: Sequence[Sequence[Any]], roles: set[str]) -> float | None:
    """By what share a step of such workers is longer while all others compute: the median over what was measured both
    ways. None where nothing was."""
    seen: dict[tuple[Any, ...], tuple[list[float], list[float]]] = {}
    for role, *what, seconds, busy in points:
        if role in roles:
            seen.setdefault(tuple(what), ([], []))[int(busy > 0.5)].append(float(seconds))
    ratios = [median(loaded) / median(alone) for alone, loaded in seen.values() if alone and loaded]
    return round(max(0.0, median(ratios) - 1), 4) if ratios else None


def _alone(points: Sequence[Sequence[Any]], among: float, beside: float) -> list[list[Any]]:
    """As if nobody else had computed: `among` equals, or `beside` others."""
    return [
        [role, *what, s / (1 + (among if role == "colocated" else beside) * busy)] for role, *what, s, busy in points
    ]


def _reading(calibration: dict[str, Any], role: str, chunk: int, most: float) -> Terms | None:
    """A step of a prompt: (constant, a token, a token times one before it). The constant is `most` at most, that of a
    step that decodes: lengths that are alike do not tell it from the tokens, and what it is too large for is theirs."""
    seen = [(int(n), float(s)) for r, n, s in calibration.get("prefill", []) if r == role and s > 0]
    if not seen:
        return None
    rows = [(-(-n // chunk), n, n * n / 2) for n, _ in seen]
    base, token, attention = nonnegative(rows, [s for _, s in seen])
    if base <= most:
        return base, token, attention
    rest = [max(0.01 * s, s - most * steps) for (_, s), (steps, *_) in zip(seen, rows, strict=True)]
    of_tokens = [row[1:] for row in rows] if len({n for n, _ in seen}) > 1 else [(n, 0.0) for n, _ in seen]
    token, attention = nonnegative(of_tokens, rest)
    return most, token, attention


def _decoding(calibration: dict[str, Any], role: str) -> Terms | None:
    """A step that decodes: (constant, a sequence, a token of context)."""
    seen = [(float(b), float(c), float(s)) for r, b, c, s in calibration.get("decode", []) if r == role and s > 0]
    if not seen:
        return None
    return _three(nonnegative([(1.0, b, b * c) for b, c, _ in seen], [s for *_, s in seen]))


def _combined(reader: Terms, writer: Terms | None) -> StepModel:
    """By what a decode step's constant exceeds a prompt's: the reading of the weights, which a prompt hides."""
    base, token, attention = reader
    if writer is None:
        return StepModel(base_s=base, prompt_token_s=token, prompt_context_s=attention)
    step, seq, context = writer
    return StepModel(base, step - base, token, attention, seq, context)


def _first(terms: dict[str, Terms], *roles: str) -> Terms:
    return next((terms[role] for role in roles if role in terms), next(iter(terms.values())))


def _three(values: list[float]) -> Terms:
    a, b, c = values
    return a, b, c


def _link(transfer: list[tuple[float, float, float]]) -> tuple[float, float]:
    """(bytes/s, latency) from what was left of each transfer when its prompt had been read."""
    if not transfer:
        return float("inf"), 0.0
    per_byte, latency = nonnegative([(b, 1.0) for _, b, _ in transfer], [s for *_, s in transfer])
    return (1 / per_byte if per_byte else float("inf")), latency
