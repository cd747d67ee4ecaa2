"""The names that a server answers to, as middleware.

A web page can have its own name point to 127.0.0.1 and then talk to a server there as if it were its own (DNS
rebinding); the `Host` header still says whose name it was. So a server that only this machine can reach answers to
names of this machine. Addresses are always answered to: no name was resolved to reach them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from elastic.server.protocol.errors import APIError

ANY = "*"
LOCAL = ("localhost", "*.localhost")
_PORT = re.compile(r":\d*$")


class Hosts:
    """ASGI middleware: only requests whose `Host` is an address, or one of these names; `*.x` is any name below x."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = tuple(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        name = _PORT.sub("", host).lower().rstrip(".")
        allowed = ANY in self._allowed or not name or _is_address(name)  # without a name it is no browser
        if allowed or any(name.endswith(a[1:]) if a.startswith("*.") else name == a for a in self._allowed):
            await self._app(scope, receive, send)
            return
        message = f"this server does not answer to the name {host!r}; start it with --allowed-hosts to change that"
        headers = {"Connection": "close"}
        error = APIError(403, message, type="permission_error", code="host_not_allowed", headers=headers)
        await error.response()(scope, receive, send)


def names_for(host: str, address: str) -> tuple[str, ...]:
    """Return the names that a server bound to an address answers to by default: all, if others can reach it."""
    return (*LOCAL, host) if ipaddress.ip_address(address.partition("%")[0]).is_loopback else (ANY,)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
