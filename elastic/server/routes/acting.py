"""How routes act: on a thread, with answers in the words of the protocol where it cannot be done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from elastic.errors import CapacityError, StateError
from elastic.server.protocol.errors import APIError


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
