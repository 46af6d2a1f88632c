"""Errors of the API in OpenAI's form, and answers in strict JSON.

Knows status codes and bodies only. Invariant: a body never holds NaN or Infinity, and an error always says what was
wrong, which parameter it was about where that is known, and what is possible.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

MAX_MESSAGE = 2000
_TYPES = {404: "not_found_error", 413: "request_too_large", 500: "server_error", 503: "overloaded_error"}


class ApiError(Exception):
    """An answer other than 200. `status` 400 is the caller's mistake; 503 may be tried again later."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """{"error": {...}} as OpenAI's clients read it; of what the caller sent, a long message keeps the ends only."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        param = None if self.param is None else shortened(self.param, 100)
        return {"error": {"message": shortened(self.message), "type": kind, "param": param, "code": self.code}}


def shortened(text: str, most: int = MAX_MESSAGE) -> str:
    """`text`, or its beginning and end where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[len(text) - most // 2 :]}"


def to_json(value: Any) -> str:
    """Strict JSON text; ValueError on NaN or infinity, which is our own bug."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def json_response(value: Any, status: int = 200) -> Response:
    """An answer with a JSON body. Lone surrogates, which UTF-8 cannot carry, are escaped."""
    return Response(encode(to_json(value)), status, media_type="application/json")


def encode(text: str) -> bytes:
    """UTF-8 of JSON text; a lone surrogate (a user may send one in an id or model name) stays an escape."""
    return text.encode("utf-8", "backslashreplace")


def error_response(error: ApiError) -> Response:
    """The answer for an `ApiError`."""
    return json_response(error.body(), error.status)
