"""How routes act: on a thread, with answers in the words of the protocol where it cannot be done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from fastapi import APIRouter, Request, Response

from elastic.errors import CapacityError, StateError
from elastic.server.generation.bodies import JSONRoute
from elastic.server.protocol.errors import APIError
from elastic.server.protocol.fields import StrictBody
from elastic.server.routes.status import plain

T = TypeVar("T")
B = TypeVar("B", bound=StrictBody)


class ActingRoute(JSONRoute):
    """A route behind which what ranks told before is out of date: who reads the status next sees what was done.

    What finds no memory is a conflict with what the model has to do now: 409.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def acting(request: Request) -> Response:
            try:
                return await handle(request)
            except CapacityError as error:
                raise APIError(409, str(error), code="capacity_exceeded") from error
            finally:
                if (ranks := request.app.state.serving.ranks) is not None:
                    ranks.outdate()

        return acting


async def act(work: Callable[[], T]) -> T:
    """Return what work on a thread answers.

    Raises `APIError`: 409 for what cannot be now. Other errors are answered as everywhere: 404 for what is not there,
    400 for what makes no sense.
    """
    try:
        return await asyncio.to_thread(work)
    except StateError as error:
        raise APIError(409, str(error), code="conflict") from error


class ActingRoutes(Generic[T]):
    """The endpoints below `/elastic/fleet` that act on one object, where the server has it."""

    def __init__(self, served: T | None, absent: str, then: Callable[[], None] = lambda: None) -> None:
        """`absent` is the answer where there is none; `then` is called on the thread after each act."""
        self.router = APIRouter(route_class=ActingRoute)
        self._served, self._absent, self._then = served, absent, then

    def add(self, verb: str, kind: type[B], work: Callable[[T, B], dict[str, Any]]) -> None:
        """Add the endpoint of a verb: `work` does what a body says, on a thread, and returns the answer's records."""
        served = self._served

        async def absent() -> None:
            raise APIError(404, self._absent, code="not_found")

        async def endpoint(body: Any) -> dict[str, Any]:
            def done() -> dict[str, Any]:
                assert served is not None
                answer: dict[str, Any] = plain(work(served, body))
                self._then()
                return answer

            return await act(done)

        endpoint.__annotations__["body"] = kind
        answers = absent if served is None else endpoint  # whatever the body, and before it is read
        self.router.add_api_route(f"/elastic/fleet/{verb}", answers, methods=["POST"], name=verb)
