"""What becomes of a group when one of its ranks is lost: the others compute all of their layers themselves again."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from elastic.cluster.control.stage_questions import CloseStage, Recover, SetCap
from elastic.cluster.fleet.groups.group import Group
from elastic.cluster.fleet.groups.ranks import Ranks, result
from elastic.cluster.fleet.instance import Instance
from elastic.errors import ElasticError

logger = logging.getLogger(__name__)


def recover(ranks: Ranks, group: Group, lost: str) -> int:
    """Have the other members of a group go on alone; return the tokens that they compute again.

    Every sequence of an instance has keys and values in all layers. What the lost rank had of them is copied from its
    memory file if it was killed and has room at home, else the sequence is computed anew from the tokens. Dropped
    weights come back from the checkpoint. One that cannot is fenced.
    """
    left = [ranks.instance(name) for name in group.members if name != lost and ranks.there(name)]
    for instance in left:
        with suppress(ElasticError):  # what is wrong shows in the next answer
            result(instance, instance.client.ask(CloseStage(lost)))
    with ranks.flipping(instance.name for instance in left):
        asked = [(instance, instance.client.ask(Recover(lost, group.left()))) for instance in left]
        recomputed = sum(_answer(instance, answer) for instance, answer in asked)
    for instance in left:
        for home in group.members:
            with suppress(ElasticError):
                result(instance, instance.client.ask(CloseStage(home)))
        with suppress(ElasticError):
            result(instance, instance.client.ask(SetCap(group.staged.get(instance.name))))
    return recomputed


def _answer(instance: Instance, answer: Future[Any]) -> int:
    try:
        tokens: int = result(instance, answer)
    except ElasticError as error:
        logger.warning("rank %s cannot go on alone: %s", instance.name, error)
        instance.client.kill(f"it cannot go on without a lost rank: {error}")
        return 0
    return tokens
