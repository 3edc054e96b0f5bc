"""Errors as a client sees them: `{"error": {message, type, param, code}}`, an HTTP status before the first token.

ApiError
+- bad_request(param)      400: the client can mend it; `param` names the field
+- context_too_long        400 context_length_exceeded
+- method_not_allowed      405 with Allow
+- overloaded              429 with Retry-After
+- unavailable             503 with Retry-After: starting, draining, no worker, a worker lost
+- timed_out               504
"""

from typing import Any

from server.errors import PdctlError

MAX_MESSAGE = 400  # whatever a client sends, an error stays small


class ApiError(PdctlError):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.error_code = code
        self.retry_after_s = retry_after_s
        self.allow = allow

    @property
    def headers(self) -> dict[str, str]:
        wait = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return wait | ({"Allow": self.allow} if self.allow else {})

    @property
    def body(self) -> dict[str, Any]:
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[: MAX_MESSAGE - 3] + "..."
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.error_code}}


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def method_not_allowed(allow: str) -> ApiError:
    """`allow`: the methods that are, as the header has them."""
    return ApiError(405, "Method Not Allowed", allow=allow)


def context_too_long(limit: int, prompt: int, param: str, at_least: bool = False) -> ApiError:
    about = "at least " if at_least else ""
    return bad_request(
        param,
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {about}{prompt} tokens "
        "and leaves no room for output. Shorten it.",
        "context_length_exceeded",
    )


def overloaded(waiting: int, retry_after_s: int) -> ApiError:
    message = f"{waiting} sequences already wait for their first token; try again in {retry_after_s} s"
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", retry_after_s=retry_after_s)


def unavailable(message: str, code: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(503, message, kind="service_unavailable_error", code=code, retry_after_s=retry_after_s)


def no_worker() -> ApiError:
    return unavailable("no worker is ready", "no_worker", 5)


def timed_out(seconds: float) -> ApiError:
    return ApiError(504, f"the request took longer than {seconds:g} s", kind="timeout_error", code="request_timeout")
