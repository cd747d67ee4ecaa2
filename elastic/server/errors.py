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


_CODES = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
_HINTS = {
    "prompt": "must be a text (of Unicode characters), a list of texts, a list of token ids, or a list of such lists",
    "stop": "must be a text of 1 to 256 characters, or a list of at most 16 of them",
}


def _of_validation(error: RequestValidationError) -> APIError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return invalid(None, f"the body is not JSON: {reason} at position {path[0] if path else 0}", "invalid_json")
    if not path:
        return invalid(None, "the body must be a JSON object", "invalid_json")
    param = ".".join(path)
    if path[0] in _HINTS and first["type"] != "missing":
        return invalid(path[0], _HINTS[path[0]])
    return invalid(param, first["msg"], "missing" if first["type"] == "missing" else "invalid_value")


def _printable(text: str) -> str:
    """Text that is UTF-8, whatever a client sent."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} …"
