"""Hidden states between ranks of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic.engines.pipeline.transport import Key
from elastic.errors import RankLost, StateError
from support.pipeline.queue_transport import QueueExchange

LIKE = torch.zeros(1, 3, 4)


def test_what_was_sent_is_received_by_its_key_whatever_becomes_of_the_tensor() -> None:
    exchange = QueueExchange()
    a, b = exchange.transport("a", "a"), exchange.transport("b", "a")
    hidden = torch.rand(1, 3, 4)
    expected = hidden.clone()
    a.send("b", hidden, Key(1, 2))
    hidden.zero_()
    a.send("b", hidden, Key(0, 2))
    assert torch.equal(b.receive("a", LIKE, Key(0, 2)), torch.zeros(1, 3, 4))
    assert torch.equal(b.receive("a", LIKE, Key(1, 2)), expected)
    assert not exchange.boxes


def test_instances_do_not_get_each_others() -> None:
    exchange = QueueExchange()
    exchange.transport("a", "a").send("b", LIKE + 1, Key(0, 0))
    exchange.transport("a", "b").send("b", LIKE + 2, Key(0, 0))
    assert exchange.transport("b", "b").receive("a", LIKE, Key(0, 0))[0, 0, 0] == 2


def test_others_than_expected_are_refused() -> None:
    exchange = QueueExchange()
    exchange.transport("a", "a").send("b", torch.zeros(1, 2, 4), Key(0, 0))
    with pytest.raises(StateError, match="do not compute the same step"):
        exchange.transport("b", "a").receive("a", LIKE, Key(0, 0))


@pytest.mark.parametrize("end", ["lost", "close"])
def test_who_waits_is_told_of_the_end(end: str) -> None:
    exchange = QueueExchange()
    b = exchange.transport("b", "a")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(b.receive, "a", LIKE, Key(0, 0))
        if end == "lost":
            exchange.lost("a")
        else:
            b.close()
        with pytest.raises(RankLost) as error:
            waiting.result(10)
    assert error.value.rank == "a"
    with pytest.raises(RankLost):
        b.send("a", LIKE, Key(1, 0))
    b.close()
