"""What a test has left open is closed, so that the tests after it on its worker have the places for themselves."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress

import elastic
from elastic.memory import places
from elastic.runtime.installation import installations

STOPS = ("elastic.cluster.deployment.deployments", "elastic.cluster.fleet.fleet", "elastic.engines.continuous.lifetime")
"""Modules whose threads and processes end by `_stop_all`; one that was not imported has started none."""


def close_leftovers() -> list[str]:
    """Stop what serves, unwrap models, and close the places that are open still; return the names of all of these."""
    left = list(places._open)
    if not left:
        return []
    for name in STOPS:
        if name in sys.modules:
            sys.modules[name]._stop_all()
    for model in list(installations):
        with suppress(elastic.ElasticError):  # something else of it is in use: its places are forgotten below
            elastic.unwrap(model)
    gc.collect()
    for pool, _ in list(places._open.values()):
        pool.close()
    places._open.clear()
    return left
