"""A key that looks: what a client that means to change nothing sends in the place of the one it holds."""

import hashlib
import hmac


def view_twin(key: bytes) -> bytes:
    """Hex. Whoever holds a key can make its twin, nobody the key of a twin; the router lets a twin read and no more."""
    return hmac.new(key, b"pdctl view", hashlib.sha256).hexdigest().encode()
