"""A client for the status of a server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from elastic.cli.views.status_document import NotAStatus, StatusDocument, printable, read_status
from elastic.errors import ConfigError, ElasticError

PATH = "/elastic/status"
OK = range(200, 300)
MOST_BYTES = 16 << 20
ACT_S = 660.0
"""How long a server may take to act: a rank that is added loads its model."""
Send = Callable[..., Any]
"""`act` at a server: it has a verb, a body, and perhaps other seconds."""


class NoAnswer(ElasticError):
    """The server has no status for us: it cannot be reached, or is no server of Elastic."""


def base_url(text: str) -> str:
    """Return a server's address from text such as `localhost:8000`. Raises `ConfigError`."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or any(c.isspace() or not c.isprintable() for c in url):
        raise ConfigError(f"URL {text!r} is no address of a server; write http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix(PATH)


def act(url: str, token: str, verb: str, body: Mapping[str, Any], timeout_s: float = ACT_S) -> Any:
    """Have the fleet behind a server do something; return what that says of it.

    Raises `ConfigError` in its words, `NoAnswer` where there are none.
    """
    bearer = f"Bearer {token}".encode().decode("latin-1")  # which is how headers are written: as UTF-8 then
    headers = {"Content-Type": "application/json", "Authorization": bearer}
    request = urllib.request.Request(f"{url}/elastic/fleet/{verb}", json.dumps(body).encode(), headers)
    status, answer = _exchange(url, request, timeout_s)
    if status not in OK:
        raise ConfigError(f"{url} answers {status}: {_words_of(answer)}")
    try:
        document = json.loads(answer)
    except (ValueError, RecursionError):
        raise NoAnswer(f"{url} answers to {verb} what is not JSON; is it a server of Elastic?") from None
    told = document if isinstance(document, dict) else {}
    return next(iter(told.values()), None) or {}


def ask(url: str, timeout_s: float) -> StatusDocument:
    """Ask for the server's present status. Raises `NoAnswer` with one line that says what is wrong."""
    status, body = _exchange(url, url + PATH, timeout_s)
    if status not in OK:
        hint = "; is it a server of Elastic?" if status in (404, 405) else ""
        raise NoAnswer(f"{url} answers {status} to {PATH}{hint}")
    if len(body) > MOST_BYTES:
        raise NoAnswer(f"{url} answers more than {MOST_BYTES >> 20} MiB to {PATH}; is it a server of Elastic?")
    try:
        return read_status(json.loads(body))
    except NotAStatus as error:
        raise NoAnswer(f"{url}{PATH} is not the status of a server of Elastic: {error}") from None
    except (ValueError, RecursionError):
        raise NoAnswer(f"{url}{PATH} is not JSON; is it a server of Elastic?") from None


def _exchange(url: str, request: str | urllib.request.Request, timeout_s: float) -> tuple[int, bytes]:
    """Return the status of an answer and its body, up to a byte more than is read of one. Raises `NoAnswer`."""
    try:
        try:
            answer = urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.read(MOST_BYTES + 1)
    except TimeoutError:
        raise NoAnswer(f"{url} does not answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswer(f"{url} cannot be reached: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return why a server cannot be reached, in one line."""
    reason = getattr(error, "reason", error)
    reason = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return " ".join(printable(str(reason)).split())


def _words_of(body: bytes) -> str:
    """Return the message of an error of a server."""
    try:
        return printable(str(json.loads(body)["error"]["message"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return "no words of a server of Elastic"
