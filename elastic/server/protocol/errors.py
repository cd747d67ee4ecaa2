"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from elastic.errors import CapacityError, ConfigError, ElasticError, NotFound, Overloaded, StateError

RETRY_AFTER_S = 5
"""Value of the header `Retry-After` while the server drains or its engine is not serving."""
_LONGEST_MESSAGE = 500
_CODES = {
    400: "invalid_json",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    503: "unavailable",
}
_HINTS = {
    "prompt": "must be a text (of Unicode characters), a list of texts, a list of token ids, or a list of such lists; "
    "at most 128 prompts",
    "stop": "must be a text of 1 to 256 characters, or a list of at most 16 of them",
}


class APIError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        fields = {"message": _printable(self.message), "type": self.type}
        return {"error": {**fields, "param": self.param and _printable(self.param), "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def unavailable(message: str) -> APIError:
    """Make a 503: the right request at the wrong time."""
    return APIError(503, message, code="unavailable", headers={"Retry-After": str(RETRY_AFTER_S)})


def invalid(param: str | None, message: str, code: str = "invalid_value") -> APIError:
    """Make a 400 for a field, or for the whole body."""
    return APIError(400, f"{param}: {message}" if param else message, param=param, code=code)


def as_api_error(error: Exception) -> APIError:
    """Return any error as the answer that it is over HTTP."""
    match error:
        case APIError():
            return error
        case Overloaded():
            after = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return APIError(429, str(error), type="overloaded_error", code="overloaded", headers=after)
        case CapacityError():
            return APIError(400, str(error), code="capacity_exceeded")
        case NotFound():
            return APIError(404, str(error), code="not_found")
        case ConfigError():
            return APIError(400, str(error), code="invalid_value")
        case StateError():
            return unavailable(str(error))
        case ElasticError():
            return APIError(500, str(error), code="internal_error")
        case RequestValidationError():
            return _of_validation(error)
        case HTTPException():
            status = error.status_code
            return APIError(status, str(error.detail), code=_CODES.get(status), headers=error.headers)
    return APIError(500, "an error in the server; its log has more", code="internal_error")


def install(app: FastAPI) -> None:
    """Have every error of an app answered as an `APIError`."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    for kind in (APIError, ElasticError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _of_validation(error: RequestValidationError) -> APIError:
    """Return the error of the first wrong field: where it may be of several kinds, of the one that fits furthest."""
    errors = [(_path(details, error.body), details) for details in error.errors()]
    if not errors[0][0]:
        return invalid(None, "the body must be a JSON object", "invalid_json")
    start = errors[0][0]
    path, deepest = max((e for e in errors if e[0][: len(start)] == start), key=lambda e: len(e[0]))
    if deepest["type"] == "missing":
        return invalid(".".join(path), deepest["msg"], "missing")
    if path[0] in _HINTS:
        return invalid(path[0], _HINTS[path[0]])
    return invalid(".".join(path), deepest["msg"])


def _path(details: Mapping[str, Any], body: Any) -> list[str]:
    """Return the path to an error in the client's body: without the names of validators and of kinds in between."""
    path, value = [], body
    for part in details["loc"][1:]:
        if part in (value if isinstance(value, Mapping) else range(len(value)) if isinstance(value, list) else ()):
            path.append(str(part))
            value = value[part]
    if details["type"] == "missing" and len(details["loc"]) > 1:
        path.append(str(details["loc"][-1]))
    return path


def _printable(text: str) -> str:
    """Return text that is UTF-8, whatever a client sent, and not too long."""
    cut = text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} …"
    return cut.encode("utf-8", "backslashreplace").decode()
