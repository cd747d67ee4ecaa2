"""An OpenAI-compatible HTTP server in front of an engine: `create_app` and `run`. Needs the extra `serve`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic.errors import BackendUnavailable

if TYPE_CHECKING:
    from elastic.server.app import create_app
    from elastic.server.uvicorn_server import run

__all__ = ["create_app", "run"]

_HOMES = {"create_app": "elastic.server.app", "run": "elastic.server.uvicorn_server"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'elastic.server' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"{error}; serving needs: pip install 'elastic-llm[serve]'") from error
