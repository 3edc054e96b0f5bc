"""Figures in few cells. None is "-": what was not measured is not 0."""


def count(value: float | None) -> str:
    """18 -> "18", 18.42 -> "18.4", 38200 -> "38.2k"."""
    if value is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scaled = value / (1e3 if unit == "k" else size)
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{value:.1f}" if value != int(value) and value < 100 else f"{value:.0f}"


def tick(value: float) -> str:
    """A round number: 0.5, 20, 500k, 10M."""
    for step, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= step:
            return f"{value / step:g}{unit}"
    return f"{value:g}"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return "-"
    for step, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= step:
            return f"{value / step:.1f} {unit}"
    return f"{value:.0f} B"


def ms(value: float | None) -> str:
    """41.2 -> "41", 7.23 -> "7.2", 2900 -> "2.9s"."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value / 1000:.1f}s" if value < 100_000 else f"{value / 1000:.0f}s"
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def span(value: float | None) -> str:
    """With its unit: "67 ms", "1.1 s"."""
    if value is None:
        return "-"
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{ms(value)} ms"


def pair(p50: float | None, p95: float | None) -> str:
    """ "212 / 640 ms", "2.9 / 7.1 s", "0.5 ms / 13 s": what a box has room for."""
    if p50 is None or p95 is None:
        return "- / -"
    if p95 >= 1000 and p50 < 100:
        return f"{ms(p50)} ms / {p95 / 1000:.{0 if p95 >= 9950 else 1}f} s"
    if p95 >= 1000:
        return f"{p50 / 1000:.1f} / {p95 / 1000:.1f} s"
    return f"{ms(p50)} / {ms(p95)} ms"


def share(value: float | None) -> str:
    """Errors of 0.1 % are not none."""
    if value is None:
        return "-"
    return f"{value * 100:.1f}%" if 0 < value < 0.01 else f"{value * 100:.0f}%"


def clock(seconds: float) -> str:
    """02:14, then 2h14, then 3d02h."""
    whole = max(0, int(seconds))
    if whole < 3600:
        return f"{whole // 60:02}:{whole % 60:02}"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
