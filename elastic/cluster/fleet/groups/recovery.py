"""What becomes of a group when one of its ranks is lost: the others compute all of their layers themselves again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from elastic.cluster.control.messages import Question
from elastic.cluster.control.stage_questions import CloseStage, MeasureRoom, Recover, SetCap, WeightsOf
from elastic.cluster.fleet.groups.group import Group
from elastic.cluster.fleet.groups.ranks import Ranks, result
from elastic.cluster.fleet.instance import Instance
from elastic.errors import ElasticError, RankLost
from elastic.types import WeightsSource

logger = logging.getLogger(__name__)
SOURCE_S = 1.0
"""How long a rank may take to say where its weights are: a repair waits for none that is busy, or hangs."""
Sources = tuple[tuple[tuple[int, ...], WeightsSource], ...]
"""Shards, and where a rank has their weights."""


def recover(ranks: Ranks, group: Group, lost: str) -> int:
    """Have the other members of a group go on alone; return the tokens that they compute again.

    Every sequence of an instance has keys and values in all layers. What the lost rank had of them is copied from its
    memory file if it was killed and has room at home, else the sequence is computed anew from the tokens. Dropped
    weights come back from ranks that have them, or from the checkpoint. One that cannot is fenced. (KunServe,
    section 4.4)
    """
    left = [ranks.instance(name) for name in group.members if name != lost and ranks.there(name)]
    weights = find_weights(ranks, group, [instance.name for instance in left])
    for instance in left:
        with suppress(ElasticError):  # what is wrong shows in the next answer
            result(instance, instance.client.ask(CloseStage(lost)))
    with ranks.flipping(instance.name for instance in left):
        asked = [(each, each.client.ask(Recover(lost, group.left(), weights[each.name]))) for each in left]
        recomputed = sum(_answer(instance, answer) for instance, answer in asked)
    for instance in left:
        for home in group.members:
            with suppress(ElasticError):
                result(instance, instance.client.ask(CloseStage(home)))
        with suppress(ElasticError):
            result(instance, instance.client.ask(SetCap(group.staged.get(instance.name))))
    return recomputed


def find_weights(ranks: Ranks, group: Group, left: Sequence[str]) -> dict[str, Sources]:
    """Say for each rank that is left of a group where others have the weights that it lacks, as far as they say so.

    Rather in the group, whose ranks know each other; those of no group are asked for what nobody in it has.
    """
    shape = group.shape
    every = {name: frozenset(range(shape.paths[name].numbers)) for name in left}
    missing = {name: every[name] - shape.weights[name] for name in left}
    have = {name: shape.weights[name] for name in left}
    if frozenset().union(*missing.values()) - frozenset().union(*have.values()):
        outside = [instance.name for instance in ranks.serving() if instance.name not in group.members]
        rooms = _answered(ranks, {name: MeasureRoom(name) for name in outside})
        have |= {name: frozenset(room.resident) for name, room in rooms.items()}
    return {name: _sources(ranks, lacks, have) for name, lacks in missing.items()}


def _sources(ranks: Ranks, missing: frozenset[int], have: dict[str, frozenset[int]]) -> Sources:
    """Have ranks say where shards lie in their memory, each those that none before it has."""
    asked: dict[str, tuple[int, ...]] = {}
    for name, shards in have.items():
        if theirs := missing & shards:
            asked[name] = tuple(sorted(theirs))
            missing -= theirs
    told = _answered(ranks, {name: WeightsOf(shards) for name, shards in asked.items()})
    return tuple((asked[name], source) for name, source in told.items())


def _answered(ranks: Ranks, questions: Mapping[str, Question]) -> dict[str, Any]:
    """Ask ranks at the same time; return what those answer that do so soon, and with no error."""
    with suppress(RankLost):  # one has gone: nobody was asked
        answers = ranks.answers(questions.items(), within_s=SOURCE_S)
        return {name: each for name, each in zip(questions, answers, strict=True) if not isinstance(each, ElasticError)}
    return {}


def _answer(instance: Instance, answer: Future[Any]) -> int:
    try:
        tokens: int = result(instance, answer)
    except ElasticError as error:
        logger.warning("rank %s cannot go on alone: %s", instance.name, error)
        instance.client.kill(f"it cannot go on without a lost rank: {error}")
        return 0
    return tokens
