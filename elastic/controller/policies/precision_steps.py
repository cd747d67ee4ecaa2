"""The steps by which a policy makes a model coarser, and back: one layer to the next variant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.types import Restore, Swap


@dataclass(frozen=True)
class LayerSize:
    """What a decoder layer takes at its place, in bytes of whole pages."""

    full: str
    """The name of its full precision, such as `float32`."""
    full_bytes: int
    variants: Mapping[str, int]
    """Variant -> bytes."""

    def nbytes(self, variant: str) -> int:
        return self.full_bytes if variant == self.full else self.variants[variant]


@dataclass(frozen=True)
class Step:
    """One layer from a variant to a coarser one."""

    layer: int
    before: str
    after: str
    before_bytes: int
    after_bytes: int

    @property
    def freed_bytes(self) -> int:
        """What the KV cache gains; a restore takes as much."""
        return self.before_bytes - self.after_bytes


def path(order: Sequence[int], levels: Sequence[str], sizes: Sequence[LayerSize], max_layers: int) -> tuple[Step, ...]:
    """All steps, the first to do first: every layer to the first level, then every layer on to the next."""
    steps = []
    for number, after in enumerate(levels):
        for layer in order[:max_layers]:
            size = sizes[layer]
            before = levels[number - 1] if number else size.full
            steps.append(Step(layer, before, after, size.nbytes(before), size.nbytes(after)))
    return tuple(steps)


def still_there(done: Sequence[Step], layers: Sequence[str]) -> tuple[Step, ...]:
    """Of the steps that were asked for, those that the layers' variants show: none that failed, or that was undone."""
    last = {step.layer: i for i, step in enumerate(done) if layers[step.layer] == step.after}
    return tuple(step for i, step in enumerate(done) if i <= last.get(step.layer, -1))


def swaps(steps: Sequence[Step]) -> tuple[Swap, ...]:
    """The actions that do these steps."""
    return tuple(Swap(layers, variant) for variant, layers in _by_target([(s.layer, s.after) for s in steps]).items())


def restores(steps: Sequence[Step], sizes: Sequence[LayerSize]) -> tuple[Swap | Restore, ...]:
    """The actions that undo these steps, given in the order in which they are undone: last done, first undone."""
    targets = {step.layer: step.before for step in steps}
    actions: list[Swap | Restore] = []
    for variant, layers in _by_target(targets.items()).items():
        whole = tuple(layer for layer in layers if sizes[layer].full == variant)
        rest = tuple(layer for layer in layers if sizes[layer].full != variant)
        actions += [Restore(whole)] if whole else []
        actions += [Swap(rest, variant)] if rest else []
    return tuple(actions)


def _by_target(targets: Iterable[tuple[int, str]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for layer, variant in targets:
        found[variant] = (*found.get(variant, ()), layer)
    return found
