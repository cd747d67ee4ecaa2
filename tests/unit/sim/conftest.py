"""What a policy raises is logged, and its thread goes on; in a simulation it is a fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_policy_raised(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    raised = [record.exc_text for record in caplog.get_records("call") if record.name == "elastic.cluster.fleet.ticks"]
    assert not any(raised), raised
