"""How routes act: on a thread, with answers in the words of the protocol where it cannot be done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response

from elastic.errors import CapacityError, StateError
from elastic.server.generation.bodies import JSONRoute
from elastic.server.protocol.errors import APIError


class ActingRoute(JSONRoute):
    """A route behind which what ranks told before is out of date: who reads the status next sees what was done."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def acting(request: Request) -> Response:
            try:
                return await handle(request)
            finally:
                if (ranks := request.app.state.serving.ranks) is not None:
                    ranks.outdate()

        return acting


async def act(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what work on a thread answers.

    Raises `APIError`: 409 for what cannot be now. Other errors are answered as everywhere: 404 for what is not there,
    400 for what makes no sense.
    """
    try:
        return await asyncio.to_thread(work)
    except CapacityError as error:
        raise APIError(409, str(error), code="capacity_exceeded") from error
    except StateError as error:
        raise APIError(409, str(error), code="conflict") from error
