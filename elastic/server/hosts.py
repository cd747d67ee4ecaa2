"""The names that a server answers to, as middleware; and how these and the origins of web pages are written.

A web page can have its own name point to 127.0.0.1 and then talk to a server there as if it were its own (DNS
rebinding); the `Host` header still says whose name it was. So a server that only this machine can reach answers to
names of this machine. Addresses are always answered to: no name was resolved to reach them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from elastic.errors import ConfigError
from elastic.server.protocol.errors import APIError

ANY = "*"
LOCAL = ("localhost", "*.localhost")
_PORT = re.compile(r":\d*$")
_NAME = re.compile(r"\*|(\*\.)?[^\s/:*]*[^\s/:*.]")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#*@]+")


@dataclass(frozen=True)
class Hosts:
    """ASGI middleware: only requests whose `Host` is an address, or one of these names; `*.x` is any name below x."""

    app: ASGIApp
    allowed: Sequence[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        name = _PORT.sub("", host).lower().rstrip(".")
        allowed = ANY in self.allowed or not name or _is_address(name)  # without a name it is no browser
        names = map(str.lower, self.allowed)
        if allowed or any(name.endswith(a[1:]) if a.startswith("*.") else name == a for a in names):
            await self.app(scope, receive, send)
            return
        message = f"this server does not answer to the name {host!r}; start it with --allowed-hosts to change that"
        headers = {"Connection": "close"}
        error = APIError(403, message, type="permission_error", code="host_not_allowed", headers=headers)
        await error.response()(scope, receive, send)


def check_hosts(names: Sequence[str], option: str) -> None:
    """Raise `ConfigError` for names that no `Host` header is compared with."""
    what = "a name without scheme, port and path, such as example.com or *.example.com"
    _check_texts(names, option, what, lambda text: bool(_NAME.fullmatch(text)) or _is_address(text))


def check_origins(origins: Sequence[str], option: str) -> None:
    """Raise `ConfigError` for origins that no browser sends."""
    what = "an origin in small letters and without a path, such as https://example.com"
    _check_texts(origins, option, what, lambda text: bool(_ORIGIN.fullmatch(text)))


def _check_texts(texts: Sequence[str], option: str, what: str, is_good: Callable[[str], bool]) -> None:
    if isinstance(texts, str) and texts != ANY:
        raise ConfigError(f"{option} {texts!r} is one text; give a list of them")
    wrong = next((text for text in texts if not is_good(text)), None)
    if wrong is not None:
        raise ConfigError(f"{option} {wrong!r} is never met; write {what}")


def names_for(host: str, address: str) -> tuple[str, ...]:
    """Return the names that a server bound to an address answers to by default: all, if others can reach it."""
    return (*LOCAL, host) if ipaddress.ip_address(address.partition("%")[0]).is_loopback else (ANY,)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
