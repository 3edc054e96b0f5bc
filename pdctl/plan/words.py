"""A plan as text: the table and the reason, in words."""

from pdctl.plan.arithmetic import Rates, Ratio
from pdctl.plan.search import Found
from pdctl.plan.tally import Slo
from pdctl.render import table

DEFAULT_QUEUE_HIGH = 50  # router.queue_high where a profile says nothing
_CLOSE = 1.05  # layouts within 5 % count as equal: the simulation is not better than that


def arithmetic(rates: Rates, ratio: Ratio, prompt: int, output: int) -> str:
    return (
        f"prompt {prompt}, output {output}: a prefill worker serves {rates.prefill:.3g} requests/s, a decode worker "
        f"{rates.decode:.3g}; so {ratio.prefill} prefill to {ratio.decode} decode "
        f"({rates.per_device(ratio.prefill, ratio.decode):.3g} requests/s a device)"
    )


def verdict(found: list[Found], slo: Slo) -> str:
    """Whether disaggregation pays here, and why."""
    colocated = next(f for f in found if f.layout.colocated)
    splits = [f for f in found if not f.layout.colocated]
    if not splits:
        return "one device: there is nothing to split"
    best = max(splits, key=lambda f: f.rate)
    if max(best.rate, colocated.rate) <= 0:
        return "no layout meets the objectives at any rate: " + _why_none(found[0], slo)
    if best.rate > colocated.rate * _CLOSE:
        times = f"{best.rate / colocated.rate:.2f} times" if colocated.rate else "all of"
        return f"disaggregate as {best.layout}: {times} the goodput of colocated. {_why_split(best, colocated, slo)}"
    if colocated.rate > best.rate * _CLOSE:
        share = best.rate / colocated.rate
        return (
            f"disaggregation does not pay here: the best split ({best.layout}) serves {share:.0%} of what colocated "
            f"does. {_why_colocated(best)}"
        )
    return (
        f"no difference in goodput (within 5 %): take colocated, it is simpler; {best.layout} where steady token times "
        f"matter (p99 gap {best.summary.itl_p99 * 1e3:.3g} ms against {colocated.summary.itl_p99 * 1e3:.3g} ms)"
    )


def _why_split(best: Found, colocated: Found, slo: Slo) -> str:
    gaps = f"{colocated.summary.itl_p99 * 1e3:.3g} ms (split: {best.summary.itl_p99 * 1e3:.3g} ms)"
    if colocated.summary.tpot_p99 > 0.8 * slo.tpot_s:
        return f"Colocated, prompts stall the tokens of others: p99 gap {gaps}, at the limit of the TPOT objective."
    return f"Colocated, prompts wait for decoding and miss the TTFT objective first; p99 gap {gaps}."


def _why_colocated(best: Found) -> str:
    use = best.summary.utilisation
    idle = min(use, key=lambda name: use[name])
    if use[idle] < 0.6:
        return f"Its {idle} pool works only {use[idle]:.0%} of the time: so few devices cannot be split as the load is."
    if best.summary.transfer_mean > best.summary.ttft_mean / 3:
        return "The KV transfer takes over a third of TTFT: a faster link, or a higher hybrid threshold."
    return "Stalls stay within the objectives, so the freedom to put any work on any device is worth more."


def _why_none(found: Found, slo: Slo) -> str:
    s = found.summary
    return (
        f"even almost idle {found.layout} has TTFT {s.ttft_mean * 1e3:.0f} ms (objective {slo.ttft_s * 1e3:.0f}) and "
        f"TPOT {s.tpot_mean * 1e3:.1f} ms (objective {slo.tpot_s * 1e3:.1f})"
    )


def queue(best: Found, queue_high: int) -> str:
    """What router.queue_high has to be for this load, where the default or the profile's is too low; else nothing."""
    waiting, refused = best.summary.most_waiting, best.summary.num_refused
    if refused:
        return f"{refused} requests got 429 at router.queue_high = {queue_high}: more devices, or a higher one"
    if waiting >= min(queue_high, DEFAULT_QUEUE_HIGH):
        return f"up to {waiting} requests wait for a first token at once: router.queue_high = {2 * waiting}"
    return ""


def layouts(found: list[Found]) -> str:
    rows = []
    for f in found:
        s = f.summary
        use = " ".join(f"{name[0].upper()} {share:.0%}" for name, share in s.utilisation.items())
        times = [s.ttft_mean, s.ttft_p99, s.tpot_mean, s.itl_p99]
        rows.append([str(f.layout), f"{f.rate:.3g}", f"{f.per_device:.3g}", *(f"{t * 1e3:.4g}" for t in times), use])
    return table(rows, ("LAYOUT", "GOODPUT/S", "A DEVICE", "TTFT", "TTFT P99", "TPOT", "ITL P99", "BUSY"))
