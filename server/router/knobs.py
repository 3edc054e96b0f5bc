"""The one store of live knobs: every change is checked, numbered, and can be taken back. No I/O here.

1. `check` turns what somebody asks for into an `Entry` or raises `Refusal` with one of the codes of docs/admin-api.md.
2. `tuning` sends it to the workers; when they have it, `commit` makes it the newest revision.
3. `undo`, `reset` and `revert` make new revisions too: history only grows, and `replay` of it gives the store again.

Revision 1 is the profile.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from server.config import Config, Tune
from server.knobs import Knob, Value, knobs_of, profile_value
from server.router.errors import ApiError

_STATUS = {"VERSION_CONFLICT": 409, "NEEDS_RESTART": 409, "CONFLICTS_WITH": 409, "RATE_LIMITED": 429, "READ_ONLY": 403}
# (low, high, whether they may be equal): what must hold between two knobs.
_ORDERED = (
    ("decode.kv_low", "decode.kv_high", False),
    ("decode.queue_low", "decode.queue_high", False),
    ("prefill.chunk_tokens", "prefill.token_budget", True),
    ("colocated.chunk_tokens", "colocated.token_budget", True),
)


class Entry(msgspec.Struct, frozen=True):
    """One revision, as the audit log keeps it. `before` and `after` hold the knobs that it changed."""

    rev: int
    at: float  # unix time
    op: str  # set | undo | reset | revert
    by: str
    before: dict[str, Value]
    after: dict[str, Value]
    reason: str = ""
    undoes: int = 0  # the revision that this one takes back
    revert_at: float = 0.0  # unix time at which it is taken back by itself
    pending: tuple[str, ...] = ()  # workers that had not confirmed it when it was written


class Refusal(ApiError):
    """A change that is not made. `param` names the knob."""

    def __init__(self, code: str, message: str, knob: str | None = None, retry_after_s: int | None = None) -> None:
        status = _STATUS.get(code, 400)
        super().__init__(status, message, kind="refused", param=knob, code=code, retry_after_s=retry_after_s)


class KnobStore:
    def __init__(self, config: Config, max_len: int, clock: Callable[[], float]) -> None:
        self.knobs = knobs_of(config, max_len)
        self.values: dict[str, Value] = {name: knob.boot for name, knob in self.knobs.items()}
        self.rev = 1
        self.entries: list[Entry] = []
        self._config = config
        self._tune: Tune = config.tune
        self._clock = clock
        self._changed_at: dict[str, float] = {}

    @property
    def is_read_only(self) -> bool:
        return self._tune.read_only

    # -- what is asked for, checked --------------------------------------------------------------------------------

    def check(
        self,
        values: Mapping[str, Any],
        *,
        if_rev: int | None = None,
        by: str = "",
        reason: str = "",
        revert_after_s: float = 0.0,
        is_forced: bool = False,
    ) -> Entry:
        """The revision that would follow. Raises Refusal."""
        self._check_open(if_rev)
        after = {name: self._read(name, value) for name, value in values.items()}
        self._check_together(after)
        self._check_reverts(after)
        if not is_forced:
            self._govern(after)
        after = {name: value for name, value in after.items() if self._is_news(name, value)}
        revert_at = self._clock() + revert_after_s if revert_after_s else 0.0
        return self._entry("set", after, by=by, reason=reason, revert_at=revert_at)

    def _is_news(self, name: str, value: Value) -> bool:
        """A value that is there already says one thing at most: that a change which would be taken back is to stay."""
        last = next((entry for entry in reversed(self.entries) if name in entry.after), None)
        is_guarded = self._tune.auto_revert is not None
        may_go = last is not None and last.op == "set" and (is_guarded or last.revert_at > self._clock())
        return may_go or value != self.values[name]

    def undo(self, rev: int | None, *, by: str = "", reason: str = "", op: str = "undo") -> Entry:
        """Takes back revision `rev`; left out, the newest that was neither an undo nor taken back."""
        if op == "undo":
            self._check_open(None)
        taken_back = {entry.undoes for entry in self.entries}
        target = next(
            (
                entry
                for entry in reversed(self.entries)
                if (entry.rev == rev if rev is not None else not entry.undoes and entry.rev not in taken_back)
            ),
            None,
        )
        if target is None:
            raise Refusal("BAD_VALUE", "there is nothing to undo" if rev is None else f"there is no revision {rev}")
        after = {name: value for name, value in target.before.items() if name in self.knobs}
        self._check_together(after)
        return self._entry(op, after, by=by, reason=reason, undoes=target.rev)

    def reset(self, names: list[str] | None, *, by: str = "", reason: str = "") -> Entry:
        """Back to what the profile said."""
        self._check_open(None)
        for name in names or ():
            self._knob(name)
        after = {name: self.knobs[name].boot for name in (names or self.knobs) if self._differs(name)}
        self._check_together(after)
        return self._entry("reset", after, by=by, reason=reason)

    def revert(self, rev: int, by: str, reason: str) -> Entry | None:
        """By itself: what revision `rev` set and nobody has set since goes back."""
        target = next(entry for entry in self.entries if entry.rev == rev)
        later = {name for entry in self.entries if entry.rev > rev for name in entry.after}
        after = {name: self._settled(target, name) for name in target.before if name not in later}
        return self._entry("revert", after, by=by, reason=reason, undoes=rev) if after else None

    def _settled(self, entry: Entry, name: str) -> Value:
        """What `name` was before `entry`, and before those ahead of it that were to be taken back, too."""
        value = entry.before[name]
        for earlier in reversed([e for e in self.entries if e.rev < entry.rev and name in e.after]):
            if earlier.op != "set" or not earlier.revert_at:
                break
            value = earlier.before[name]
        return value

    def _entry(self, op: str, after: dict[str, Value], **more: Any) -> Entry:
        before = {name: self.values[name] for name in after}
        return Entry(self.rev + 1, round(self._clock(), 3), op, before=before, after=after, **more)

    # -- the newest revision ---------------------------------------------------------------------------------------

    def commit(self, entry: Entry) -> None:
        self.values.update(entry.after)
        self.rev = entry.rev
        self.entries.append(entry)
        self._changed_at.update(dict.fromkeys(entry.after, entry.at))

    def replay(self, entries: list[Entry]) -> None:
        """Of an earlier router of the same run. Knobs that are none any more are left out."""
        for entry in entries:
            self.commit(msgspec.structs.replace(entry, after={k: v for k, v in entry.after.items() if k in self.knobs}))

    def is_superseded(self, entry: Entry) -> bool:
        """Whether every knob of it has been set again."""
        later = {name for other in self.entries if other.rev > entry.rev for name in other.after}
        return entry.after.keys() <= later

    # -- rules -----------------------------------------------------------------------------------------------------

    def _check_open(self, if_rev: int | None) -> None:
        if self.is_read_only:
            raise Refusal("READ_ONLY", "tune.read_only is set in the profile")
        if if_rev is not None and if_rev != self.rev:
            raise Refusal("VERSION_CONFLICT", f"the knobs are at revision {self.rev}, not {if_rev}")

    def _knob(self, name: str) -> Knob:
        if (knob := self.knobs.get(name)) is not None:
            return knob
        try:
            profile_value(self._config, name)
        except AttributeError:
            close = difflib.get_close_matches(name, self.knobs, n=2, cutoff=0.5)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise Refusal("UNKNOWN_KNOB", f"there is no knob {name!r}{hint}", name) from None
        raise Refusal("NEEDS_RESTART", f"{name} is read at the start: change the profile and restart", name)

    def _read(self, name: str, value: Any) -> Value:
        knob = self._knob(name)
        if value == "auto" and knob.has_auto:
            return "auto"
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (not knob.is_share and value != int(value)):
            what = "a share such as 0.8" if knob.is_share else "a whole number"
            raise Refusal(
                "BAD_VALUE",
                f"{name}: {msgspec.json.encode(value).decode()} is not {what}{' or auto' if knob.has_auto else ''}",
                name,
            )
        if not knob.low <= value <= knob.high:
            raise Refusal("OUT_OF_RANGE", f"{name}: {value} is not in {knob.low:g}..{knob.high:g} {knob.unit}", name)
        if knob.step > 1 and value % knob.step:
            raise Refusal("OUT_OF_RANGE", f"{name}: {value} is not a multiple of {knob.step}", name)
        return float(value) if knob.is_share else int(value)

    def _check_together(self, after: Mapping[str, Value]) -> None:
        values = {**self.values, **after}
        for low, high, may_be_equal in _ORDERED:
            if low not in values or not (low in after or high in after):
                continue
            one, other = values[low], values[high]
            if isinstance(one, str) or isinstance(other, str) or one < other or (may_be_equal and one == other):
                continue
            relation = "may not be over" if may_be_equal else "must be under"
            raise Refusal("CONFLICTS_WITH", f"{low} ({one}) {relation} {high} ({other})", low if low in after else high)

    def _check_reverts(self, after: Mapping[str, Value]) -> None:
        """What is taken back later, by itself, must go with `after`, each alone and all of it."""
        back: dict[str, Value] = {}
        for name in self.knobs.keys() - after.keys():
            last = next((entry for entry in reversed(self.entries) if name in entry.after), None)
            if last is not None and last.op == "set" and last.revert_at > self._clock():
                back[name] = self._settled(last, name)
        for each in [*({name: value} for name, value in back.items()), back]:
            try:
                self._check_together({**after, **each})
            except Refusal as refusal:
                names = ", ".join(sorted(each))
                message = f"{refusal.message}, once {names} is taken back (--revert-after): set it again to keep it"
                raise Refusal("CONFLICTS_WITH", message, refusal.param) from None

    def _govern(self, after: Mapping[str, Value]) -> None:
        """The limits of [tune]. Undo, reset and a forced set pass."""
        tune, now = self._tune, self._clock()
        for name, value in after.items():
            left_s = self._changed_at.get(name, -math.inf) + (tune.min_interval or 0.0) - now
            if left_s > 0:
                message = f"{name} was changed less than {tune.min_interval:g} s ago (tune.min_interval)"
                raise Refusal("RATE_LIMITED", message, name, retry_after_s=math.ceil(left_s))
            old = self.values[name]
            if tune.max_step is None or isinstance(old, str) or isinstance(value, str):
                continue
            if abs(value - old) > max(self.knobs[name].step, tune.max_step * abs(old)) + 1e-9:
                message = f"{name}: {old} to {value} is more than {tune.max_step:.0%} at once (tune.max_step)"
                raise Refusal("RATE_LIMITED", message, name)

    def _differs(self, name: str) -> bool:
        return self.values[name] != self.knobs[name].boot
