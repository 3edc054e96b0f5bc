"""API keys: read from a file, again whenever it changes, and compared in constant time.

1. `Keys.check` says whose request it is, or 401. One key a line; blank lines and # comments are skipped.
2. A file that cannot be read, or holds no key, while the router runs changes nothing: the keys known before stay.
3. `AdminKeys` lets a view key read, and refuses it everything else.
4. `Quota` counts the sequences that each key has in flight, and says 429 over the limit.
"""

import hashlib
import hmac
import logging
from collections import Counter
from pathlib import Path
from typing import Self

from starlette.datastructures import Headers
from starlette.requests import Request

from server.errors import StartError
from server.router.errors import ApiError, bad_request
from server.viewing import view_twin

logger = logging.getLogger(__name__)


class Keys:
    """Accepted keys; none = everybody is let in."""

    def __init__(self, keys: list[bytes], file: Path | None = None) -> None:
        self._use(keys)
        self._file = file
        self._stamp = _stamp(file)

    @classmethod
    def read(cls, path: str | None) -> "Keys":
        """Raises StartError."""
        if path is None:
            return cls([])
        file = Path(path).expanduser()
        try:
            keys = _read(file)
        except OSError as error:
            raise StartError(f"cannot read the key file: {error}") from error
        if not keys:
            raise StartError(f"{path} holds no key")
        return cls(keys, file)

    def check(self, headers: Headers) -> str:
        """A name for the key, not the key; empty when everybody is let in. Raises ApiError 401.

        `Authorization: Bearer KEY`, or `X-Api-Key: KEY`.
        """
        if not self._known():
            return ""
        given = _given(headers)
        if not self.has(given):
            raise _unauthorized(given)
        return _digest(given).hex()[:16]

    def has(self, given: bytes) -> bool:
        return _is_among(given, self._known())

    def has_twin(self, given: bytes) -> bool:
        """Whether it is the view twin of one of these."""
        self._known()
        return _is_among(given, self._twins)

    def _known(self) -> list[bytes]:
        self._reload()
        return self._digests

    def _reload(self) -> None:
        """A look at the file's times costs a microsecond."""
        if self._file is None or (stamp := _stamp(self._file)) == self._stamp:
            return
        self._stamp = stamp
        try:
            keys = _read(self._file)
        except OSError as error:
            logger.warning("the key file cannot be read, the keys stay as they were: %s", error)
            return
        if not keys:
            logger.warning("the key file holds no key, the keys stay as they were")
            return
        self._use(keys)
        logger.info("keys read again", extra={"fields": {"keys": len(keys)}})

    def _use(self, keys: list[bytes]) -> None:
        self._digests = [_digest(key) for key in keys]
        self._twins = [_digest(view_twin(key)) for key in keys]


class AdminKeys:
    """Who may look at a stack, and who may change it as well.

    Looking takes an admin key, a view key, or the twin of either, which a client that means to change nothing sends.
    """

    def __init__(self, admin: Keys, view: Keys) -> None:
        self._admin = admin
        self._view = view

    def admit(self, request: Request) -> bool:
        """Whether the key may change things. Raises ApiError 401, and 403 where one that may not asks for a change."""
        given = _given(request.headers)
        if self._admin.has(given):
            return True
        if not (self._view.has(given) or self._admin.has_twin(given) or self._view.has_twin(given)):
            raise _unauthorized(given)
        if request.method not in ("GET", "HEAD"):
            raise ApiError(403, "this key may look and not change", kind="permission_error", code="READ_ONLY")
        return False


class Quota:
    """Sequences in flight by key: a request counts as one until it is read, then as its prompts times n."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.counts: Counter[str] = Counter()

    def hold(self, key: str) -> "Held":
        """One sequence, for as long as the context lasts. Raises ApiError 429."""
        held = Held(self, key if self.most else "")
        held.grow(1)
        return held


class Held:
    """What one request holds of its key's quota; without a key nothing is counted."""

    def __init__(self, quota: Quota, key: str) -> None:
        self._quota = quota
        self._key = key
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def grow(self, count: int) -> None:
        """To `count` sequences. Raises ApiError 429, and 400 when the key may never have as many."""
        if not self._key:
            return
        most, counts = self._quota.most, self._quota.counts
        if count > most:
            raise bad_request("n", f"n: prompts times n make {count} sequences, and this API key may have {most}")
        if counts[self._key] - self._count + count > most:
            message = f"this API key has {counts[self._key]} sequences in flight and may have {most}"
            raise ApiError(429, message, kind="rate_limit_error", code="key_limit", retry_after_s=1)
        counts[self._key] += count - self._count
        self._count = count

    def release(self) -> None:
        if self._count:
            self._quota.counts[self._key] -= self._count
            if not self._quota.counts[self._key]:
                del self._quota.counts[self._key]


def _given(headers: Headers) -> bytes:
    """The key as the header's bytes came; empty where there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return given.encode("latin-1")


def _is_among(given: bytes, digests: list[bytes]) -> bool:
    """Every key is compared, and by digests of one length, so that the time taken tells nothing."""
    digest = _digest(given)
    return sum(hmac.compare_digest(digest, known) for known in digests) > 0


def _unauthorized(given: bytes) -> ApiError:
    what = "is not valid" if given else "is missing: send Authorization: Bearer KEY"
    return ApiError(401, f"the API key {what}", kind="authentication_error", code="invalid_api_key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(file: Path) -> list[bytes]:
    lines = [line.strip() for line in file.read_bytes().splitlines()]
    return [line for line in lines if line and not line.startswith(b"#")]


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    try:
        stat = file.stat() if file else None
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else None
