"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from elastic.errors import CapacityError, ConfigError, ElasticError, Overloaded, StateError

RETRY_AFTER_S = 5
"""What a client is told while the server drains or its engine is not serving."""
_LONGEST_MESSAGE = 500
_log = logging.getLogger(__name__)


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
        """The JSON of the answer."""
        fields = {"message": _printable(self.message), "type": self.type}
        return {"error": {**fields, "param": self.param and _printable(self.param), "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def unavailable(message: str) -> APIError:
    """503: the right request at the wrong time."""
    return APIError(503, message, code="unavailable", headers={"Retry-After": str(RETRY_AFTER_S)})


def unsupported(param: str, message: str) -> APIError:
    return APIError(400, f"{param}: {message}", param=param, code="unsupported_value")


def invalid(param: str | None, message: str, code: str = "invalid_value") -> APIError:
    return APIError(400, f"{param}: {message}" if param else message, param=param, code=code)


def in_words(error: ElasticError) -> APIError:
    """What an error of Elastic is over HTTP."""
    match error:
        case Overloaded():
            after = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return APIError(429, str(error), type="overloaded_error", code="overloaded", headers=after)
        case CapacityError():
            return APIError(400, str(error), code="capacity_exceeded")
        case ConfigError():
            return APIError(400, str(error), code="invalid_value")
        case StateError():
            return unavailable(str(error))
    return APIError(500, str(error), code="internal_error")


def install(app: FastAPI) -> None:
    """Have every error of an app answered so."""

    @app.exception_handler(APIError)
    async def api_error(request: Request, error: APIError) -> JSONResponse:
        return error.response()

    @app.exception_handler(ElasticError)
    async def elastic_error(request: Request, error: ElasticError) -> JSONResponse:
        return in_words(error).response()

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return _of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        detail = str(error.detail)
        return APIError(error.status_code, detail, code=_CODES.get(error.status_code), headers=error.headers).response()

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> JSONResponse:
        return APIError(500, "an error in the server; its log has more", code="internal_error").response()


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


def _of_validation(error: RequestValidationError) -> APIError:
    """The error of the first wrong field: where it may be of several kinds, of the one that fits furthest."""
    errors = [(_path(one, error.body), one) for one in error.errors()]
    if not errors[0][0]:
        return invalid(None, "the body must be a JSON object", "invalid_json")
    start = errors[0][0]
    path, deepest = max((e for e in errors if e[0][: len(start)] == start), key=lambda e: len(e[0]))
    if deepest["type"] == "missing":
        return invalid(".".join(path), deepest["msg"], "missing")
    if path[0] in _HINTS:
        return invalid(path[0], _HINTS[path[0]])
    return invalid(".".join(path), deepest["msg"])


def _path(error: Mapping[str, Any], body: Any) -> list[str]:
    """Where an error is, in what the client sent: without the names of validators and of kinds in between."""
    path, here = [], body
    for part in error["loc"][1:]:
        if part in (here if isinstance(here, Mapping) else range(len(here)) if isinstance(here, list) else ()):
            path.append(str(part))
            here = here[part]
    if error["type"] == "missing" and len(error["loc"]) > 1:
        path.append(str(error["loc"][-1]))
    return path


def _printable(text: str) -> str:
    """Text that is UTF-8, whatever a client sent."""
    cut = text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} …"
    return cut.encode("utf-8", "backslashreplace").decode()
