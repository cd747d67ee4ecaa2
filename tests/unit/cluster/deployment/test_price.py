"""What the steps of a change take: by their bytes, and by what steps of their kind took besides."""

from __future__ import annotations

import pytest

from elastic.assets import MODEL_DIR
from elastic.cluster.deployment.choice import Chooser
from elastic.cluster.deployment.price import KEPT, StepPrices
from elastic.cluster.deployment.status import TransitionStep
from elastic.cluster.fleet.overload.offers import START_S
from elastic.estimation.device_list import parse_devices
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.ranking import Estimate

LAYERS = range(12)
WANTED = Deployment(Configuration(), (), 1, Estimate(Configuration(), (), (), "", "", 1), ())


@pytest.fixture(scope="module")
def chooser() -> Chooser:
    return Chooser(MODEL_DIR, parse_devices("cpu#a=64MiB,cpu#b=64MiB"), ("full", "int8"), ("full",))


def seconds(prices: StepPrices, chooser: Chooser, *steps: TransitionStep) -> list[float]:
    return [each.seconds for each in prices.priced(steps, chooser, Configuration(2), WANTED)]


def test_without_an_earlier_change_steps_take_what_their_bytes_do(chooser: Chooser) -> None:
    swap = TransitionStep("swap", ("a",), (LAYERS,), "int8")
    half = TransitionStep("swap", ("a",), (LAYERS[:6],), "int8")
    whole, part, none = StepPrices().priced(
        [swap, half, TransitionStep("share", ("a", "b"))], chooser, Configuration(), WANTED
    )
    assert whole.moved_bytes == 2 * part.moved_bytes > 0
    assert whole.seconds > part.seconds > 0
    assert (none.moved_bytes, none.seconds) == (0, 0.0)


def test_ranks_begin_one_after_another(chooser: Chooser) -> None:
    prices, add = StepPrices(), TransitionStep("add", ("a", "b"))
    assert seconds(prices, chooser, add) == [2 * START_S]
    prices.begin_s = 3.0
    assert seconds(prices, chooser, add) == [6.0]
    prices.note(add, 1.0)
    assert seconds(prices, chooser, add, TransitionStep("add", ("a",))) == [1.0, 0.5]


def test_what_steps_took_besides_their_bytes_is_expected_of_the_next_of_their_kind(chooser: Chooser) -> None:
    prices = StepPrices()
    half = TransitionStep("swap", ("a",), (LAYERS[:6],), "int8")
    swap, share = TransitionStep("swap", ("a",), (LAYERS,), "int8"), TransitionStep("share", ("a", "b"))
    [by_bytes] = seconds(prices, chooser, swap)
    for besides in (9.0, 1.0, 3.0):
        [done] = prices.priced([half], chooser, Configuration(), WANTED)
        prices.note(done, seconds(StepPrices(), chooser, half)[0] + besides)
    assert seconds(prices, chooser, swap, share) == [pytest.approx(by_bytes + 3.0), 0.0]
    for _ in range(KEPT):
        prices.note(share, 2.0)
    prices.note(share, 50.0)
    assert seconds(prices, chooser, share) == [2.0]
