"""How routes act: on a thread, with answers in the words of the protocol where it cannot be done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from elastic.errors import CapacityError, ConfigError, StateError
from elastic.server.protocol.errors import APIError


async def act(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what work on a thread answers.

    Raises `APIError`: 404 for what is not there, 400 for what makes no sense, 409 for what cannot be now.
    """
    try:
        return await asyncio.to_thread(work)
    except ConfigError as error:
        raise APIError(404 if "there is no" in str(error) else 400, str(error), code="not_found") from error
    except CapacityError as error:
        raise APIError(409, str(error), code="capacity_exceeded") from error
    except StateError as error:
        raise APIError(409, str(error), code="conflict") from error
