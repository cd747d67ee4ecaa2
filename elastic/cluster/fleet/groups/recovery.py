"""What becomes of a group when one of its ranks is lost: the others compute all of their layers themselves again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from elastic.cluster.control.messages import Question
from elastic.cluster.control.stage_questions import CloseStage, KeptLayers, MeasureRoom, Recover, WeightsOf
from elastic.cluster.fleet.groups.group import Group
from elastic.cluster.fleet.groups.ranks import Ranks, result
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.engines.core.kv_state import LayersKV
from elastic.errors import ElasticError, RankLost
from elastic.types import WeightsSource

logger = logging.getLogger(__name__)
SOURCE_S = 1.0
"""How long ranks may take to say what weights they have, and then where: a repair waits for none that hangs."""
Sources = tuple[tuple[tuple[int, ...], WeightsSource], ...]
"""Shards, and where a rank has their weights."""


def recover(ranks: Ranks, group: Group, lost: str) -> int:
    """Have the other members of a group go on alone; return the tokens that they compute again.

    Every sequence of an instance has keys and values in all layers. What the lost rank had of them is copied from its
    memory file if it was killed and has room at home, else the sequence is computed anew from the tokens. Dropped
    weights come back from ranks that have them, or from the checkpoint. One that cannot is fenced, and all of them are
    where the repair itself fails: nobody waits for ranks that nobody repairs. (KunServe, section 4.4)
    """
    try:
        return _go_on_alone(ranks, group, lost, _left(ranks, group, lost))
    except Exception as error:  # whatever it is, requests go on at other ranks
        members = ", ".join(group.members)
        logger.exception("the group %s could not be repaired without rank %s; its others are fenced", members, lost)
        for instance in _left(ranks, group, lost):
            instance.client.kill(f"the repair of its group failed: {type(error).__name__}: {error}")
        return 0


def _left(ranks: Ranks, group: Group, lost: str) -> list[Instance]:
    """List the other members that have not gone."""
    with ranks.dispatcher.lock:
        there = ranks.dispatcher.present(name for name in group.members if name != lost).values()
    return [instance for instance in there if not instance.client.lost]


def _go_on_alone(ranks: Ranks, group: Group, lost: str, left: Sequence[Instance]) -> int:
    weights = find_weights(ranks, group, [instance.name for instance in left])
    with ranks.dispatcher.lock:
        keep = ranks.dispatcher.held.epoch(lost) is not None
    for instance in left:
        with suppress(ElasticError):  # what is wrong shows in the next answer
            ranks.ask(instance.name, CloseStage(lost, keep))
    memories = {rank: group.memories[rank].source for rank in group.killed if rank in group.memories}
    with ranks.flipping(instance.name for instance in left):
        asked = [(each, each.client.ask(Recover(lost, memories, weights[each.name]))) for each in left]
        recomputed = sum(_answer(instance, answer) for instance, answer in asked)
    for instance in left:
        for home in group.members:
            if home != lost:
                with suppress(ElasticError):
                    ranks.ask(instance.name, CloseStage(home))
        with suppress(ElasticError):
            ranks.set_caps({instance.name: group.staged.get(instance.name)})
    return recomputed


def go_on(ranks: Ranks, lost: str, others: Sequence[str]) -> None:
    """Have requests of a killed rank go on that waited for the repair of its group, `others`, if they still wait.

    What these have computed for it is kept until it was copied; the rest lies in the killed rank's memory file.
    """
    dispatcher = ranks.dispatcher
    with dispatcher.lock:
        epoch, there = dispatcher.held.epoch(lost), dispatcher.present(others).values()
    kept = [] if epoch is None else [(each, kv) for each in there if (kv := _kept_at(each, lost, epoch)) is not None]
    with Delivery(dispatcher.lock) as delivery:
        kept = [(each, kv) for each, kv in kept if not each.leaving]  # or its pages may go while they are read
        dispatcher.requeue(dispatcher.held.go_on(lost, kept, dispatcher.clock()), delivery)
        dispatcher.dispatch()
        dispatcher.changed.notify_all()


def _kept_at(instance: Instance, lost: str, epoch: int) -> LayersKV | None:
    """Say where a rank has what it computed for one that was killed, by the path of that epoch, and keeps it; or None.

    What others could not read is not kept.
    """
    try:
        if instance.same_host:
            kept: LayersKV = result(instance, instance.client.ask(KeptLayers(lost, epoch)), SOURCE_S)
            if kept.file is not None:
                return kept
    except ElasticError as error:
        logger.info("rank %s keeps nothing of rank %s: %s", instance.name, lost, error)
    except Exception:  # whatever it is, requests go on
        logger.exception("rank %s could not be asked what it keeps of rank %s", instance.name, lost)
    instance.client.ask(CloseStage(lost))
    return None


def find_weights(ranks: Ranks, group: Group, left: Sequence[str]) -> dict[str, Sources]:
    """Say for each rank that is left of a group where others have the weights that it lacks, as far as they say so.

    Rather in the group, whose ranks know each other; those of no group are asked for what nobody in it has.
    """
    paths, have = group.shape.paths, {name: group.shape.weights[name] for name in left}
    missing = {name: frozenset(range(paths[name].numbers)) - have[name] for name in left}
    if frozenset().union(*missing.values()) - frozenset().union(*have.values()):
        outside = [instance.name for instance in ranks.serving() if instance.name not in group.members]
        rooms = _answers(ranks, [(name, MeasureRoom(name)) for name in outside])
        have |= {name: frozenset(room.resident) for name, room in zip(outside, rooms, strict=True) if room is not None}
    wanted = [(name, *theirs) for name, lacks in missing.items() for theirs in _shared_out(lacks, have)]
    if strangers := [other for _, other, _ in wanted if other not in left]:
        with suppress(ElasticError):  # they read files of this host all the same
            ranks.introduce(dict.fromkeys((*left, *strangers)))
    told = _answers(ranks, [(other, WeightsOf(shards)) for _, other, shards in wanted])
    sources: dict[str, list[tuple[tuple[int, ...], WeightsSource]]] = {name: [] for name in left}
    for (name, _, shards), source in zip(wanted, told, strict=True):
        if source is not None:
            sources[name].append((shards, source))
    return {name: tuple(each) for name, each in sources.items()}


def _shared_out(missing: frozenset[int], have: Mapping[str, frozenset[int]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield which rank is asked for which shards: each for those that none before it has."""
    for name, shards in have.items():
        if theirs := missing & shards:
            yield name, tuple(sorted(theirs))
            missing -= theirs


def _answers(ranks: Ranks, questions: Sequence[tuple[str, Question]]) -> list[Any]:
    """Ask ranks at the same time; return what each answered soon, None for an error or none."""
    try:
        answers = ranks.answers(questions, within_s=SOURCE_S)
    except RankLost:  # one has gone: nobody was asked
        return [None] * len(questions)
    return [None if isinstance(answer, ElasticError) else answer for answer in answers]


def _answer(instance: Instance, answer: Future[Any]) -> int:
    try:
        tokens: int = result(instance, answer)
    except ElasticError as error:
        logger.warning("rank %s cannot go on alone: %s", instance.name, error)
        instance.client.kill(f"it cannot go on without a lost rank: {error}")
        return 0
    return tokens
