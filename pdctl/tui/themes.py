"""What a role looks like in each theme; Textual's own widgets, in dialogs, get the same colours.

cb-safe takes Okabe and Ito's palette: blue, orange and vermilion stay apart for every common kind of colour blindness.
ansi uses the terminal's own sixteen colours. mono is what NO_COLOR gets: weight, dimness and reverse only.
"""

from collections.abc import Mapping

from rich.style import Style
from textual.theme import Theme

NAMES = ("dark", "light", "cb-safe", "ansi")

_COMMON = {"bold": "bold", "brand": "bold reverse", "title": "bold", "head": "bold"}
_ROLES: dict[str, dict[str, str]] = {
    "dark": {
        "": "#d8dee9",
        "dim": "#7f8a99",
        "border": "#4c566a",
        "good": "#8fce7a",
        "warn": "#f0b952",
        "bad": "bold #f26d6d",
        "accent": "#6cb6ff",
        "spark": "#56b8c4",
        "mark-low": "#f0b952",
        "mark-high": "bold #f26d6d",
        "select": "#ffffff on #2f4466",
        "lost": "#5c6470",
        "head": "bold #a9b7c9",
        "title": "bold #e5ecf5",
    },
    "light": {
        "": "#1f2933",
        "dim": "#66707c",
        "border": "#aab4c0",
        "good": "#1f7a33",
        "warn": "#9a5b00",
        "bad": "bold #b3261e",
        "accent": "#0b57b7",
        "spark": "#0a7482",
        "mark-low": "#9a5b00",
        "mark-high": "bold #b3261e",
        "select": "#0b1f3a on #cfe0f7",
        "lost": "#a9b0b8",
        "head": "bold #3c4a59",
        "title": "bold #101820",
    },
    "cb-safe": {
        "": "#e6e6e6",
        "dim": "#9a9a9a",
        "border": "#5f5f5f",
        "good": "#56b4e9",
        "warn": "#e69f00",
        "bad": "bold #d55e00",
        "accent": "#f0e442",
        "spark": "#56b4e9",
        "mark-low": "#e69f00",
        "mark-high": "bold #d55e00",
        "select": "#000000 on #f0e442",
        "lost": "#6f6f6f",
    },
    "ansi": {
        "": "default",
        "dim": "bright_black",
        "border": "bright_black",
        "good": "green",
        "warn": "yellow",
        "bad": "bold red",
        "accent": "cyan",
        "spark": "blue",
        "mark-low": "yellow",
        "mark-high": "bold red",
        "select": "reverse",
        "lost": "bright_black",
    },
    "mono": {
        "dim": "dim",
        "border": "dim",
        "warn": "bold",
        "bad": "bold reverse",
        "accent": "bold",
        "mark-high": "bold",
        "select": "reverse",
        "lost": "dim",
    },
}
_GROUND = {"dark": "#12161d", "light": "#fbfcfd", "cb-safe": "#101010"}


def styles(name: str, *, is_mono: bool = False) -> Mapping[str, Style]:
    """Role -> style; an unknown role looks like plain text."""
    ground = "" if is_mono or name not in _GROUND else f" on {_GROUND[name]}"
    roles = _ROLES["mono" if is_mono else name]
    plain = roles.get("", "")
    parsed = {}
    for role, text in {**_COMMON, **roles}.items():
        has_ground = " on " in text
        if role in ("bold", "brand") and plain and plain != "default":
            text = f"{text} {plain}"
        parsed[role] = Style.parse((text + ("" if has_ground else ground)).strip() or "none")
    parsed[""] = Style.parse((plain + ground).strip() or "none")
    return parsed


def textual_theme(name: str) -> Theme:
    """For dialogs and inputs."""
    roles = _ROLES[name]

    def colour(role: str) -> str:
        return roles[role].split(" on ")[0].split()[-1]

    return Theme(
        name=f"pdctl-{name}",
        primary=colour("accent"),
        secondary=colour("spark"),
        warning=colour("warn"),
        error=colour("bad"),
        success=colour("good"),
        accent=colour("accent"),
        foreground=colour(""),
        background=_GROUND[name],
        surface=_GROUND[name],
        panel=_GROUND[name],
        dark=name != "light",
    )


# For terminals and fonts without box drawing, blocks and braille: one character each.
ASCII = {
    **dict.fromkeys("╭╮╰╯", "+"),
    **dict.fromkeys("─┄", "-"),
    **dict.fromkeys("│┃", "|"),
    "┊": ":",
    "█": "#",
    **dict.fromkeys("▉▊▋▌", "#"),
    **dict.fromkeys("▍▎▏", "="),
    "░": ".",
    **dict(zip("▁▂▃▄▅▆▇", "_.,-=+*", strict=True)),
    "●": "*",
    "◌": "o",
    "○": "o",
    "▲": "!",
    "▽": "v",
    "✗": "x",
    "✓": "v",
    "▸": ">",
    "▶": ">",
    "‖": "|",
    "→": ">",
    "←": "<",
    "≤": "<",
    "≥": ">",
    "⏎": "^",
    "…": "~",
    "“": '"',
    "”": '"',
    "·": ".",
    "×": "x",
}


def to_ascii(text: str) -> str:
    return "".join(
        ASCII.get(char, char if char < "\x7f" else "#" if "\u2800" <= char <= "\u28ff" else "?") for char in text
    )
