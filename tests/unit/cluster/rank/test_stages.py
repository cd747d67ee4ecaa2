"""What a rank does with questions about layers of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from elastic.cluster.control.stage_questions import (
    AttachStage,
    BeginExchange,
    CloseStage,
    DetachStage,
    EndExchange,
    FlipLayers,
    LosePeer,
    MeetPeers,
    OpenPeers,
    OpenStage,
)
from elastic.cluster.peers.hub import PeerHub
from elastic.cluster.rank.stages import Stages
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import ConfigError, RankLost, StateError
from support.architectures import build
from support.wrapped_model import small


@pytest.fixture
def engine(wrapped: Any) -> Iterator[ContinuousEngine]:
    made = ContinuousEngine(wrapped(build("llama-mha"), small(2 << 20)), block_tokens=4)
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize("hurried", [True, False])
def test_steps_are_short_while_requests_wait_for_the_end_of_an_exchange(
    engine: ContinuousEngine, hurried: bool
) -> None:
    stages, scheduler = Stages(engine, "127.0.0.1"), engine._loop.scheduler
    stages.answer(BeginExchange((0,), hurried))
    assert (scheduler.short_until_s > scheduler._last_s) == hurried
    scheduler.short_until_s = 0.0
    with pytest.raises(ConfigError):  # it is the path of now
        stages.answer(FlipLayers(engine.path, hurried=hurried))
    assert (scheduler.short_until_s > scheduler._last_s) == hurried
    stages.answer(EndExchange())


def test_a_rank_that_has_ended_listens_for_no_others(engine: ContinuousEngine) -> None:
    """The fleet may ask while it ends, on another thread: nobody would close what listens then."""
    stages = Stages(engine, "127.0.0.1")
    stages.close()
    with pytest.raises(StateError, match="has ended"):
        stages.meet(OpenPeers("r0", b"a key of this test's own"))
    assert stages.meet(LosePeer("r1")) is None


def test_of_a_stage_that_is_refused_no_connection_is_left(engine: ContinuousEngine) -> None:
    key, stages = b"a key of this test's own", Stages(engine, "127.0.0.1")
    with ExitStack() as stack:
        stack.callback(stages.close)
        other = stack.enter_context(closing(PeerHub("r1", key)))
        engine.rank = "r0"
        other.meet({"r0": stages.meet(OpenPeers("r0", key))})
        stages.meet(MeetPeers({"r1": other.address}))

        home = other.connect_log("r0", "r1")
        with pytest.raises(ConfigError, match="layers"):
            stages.answer(OpenStage("r1", LayerPath.alone("r1", engine.path.layers + 1), 1, 1))
        assert stages._opened._logs == set()
        with pytest.raises(RankLost):
            home.receive()
        transport = stages._opened.transport("r1")
        stages.answer(CloseStage("r1"))
        assert transport.closed
        assert stages._opened._transports == {}

        stages.answer(AttachStage("r1"))
        taken = other.accept_log("r0", 10)
        with pytest.raises(StateError, match="attached"):
            stages.answer(AttachStage("r1"))
        assert len(stages._opened._logs) == 1, "that of the first"
        with pytest.raises(RankLost):
            other.accept_log("r0", 10).receive()
        taken.send("which is read")
        stages.answer(DetachStage("r1"))
