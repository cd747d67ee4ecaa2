"""What was noted under the lock is told, also where something fails behind it."""

from __future__ import annotations

import threading
from contextlib import suppress

from elastic.cluster.fleet.records.delivery import Delivery
from elastic.cluster.fleet.records.requests import new_record
from elastic.engines.base import Output, Request
from support.serving.generations import Collector


def test_what_was_added_is_told_though_the_block_fails_and_so_is_what_comes_next() -> None:
    lock, heard = threading.Lock(), Collector()
    record = new_record(Request((1,), 9, id="one"), heard, 0.0)
    with suppress(KeyError), Delivery(lock) as delivery:
        delivery.add(record, Output("one", (7,)))
        raise KeyError("a fault of the fleet")
    with Delivery(lock) as delivery:
        delivery.add(record, Output("one", (8,)))
    assert heard.tokens["one"] == [7, 8]
