"""`estimate`: what every configuration of a model on some devices would hold, and how fast it would be. (iServe)"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, get_args

import torch

from elastic.engines.core.kv_state import INT8
from elastic.errors import ConfigError, is_number, require, require_flag, require_whole
from elastic.estimation.costs import Parts, among_ranks, costs_of
from elastic.estimation.device_list import parse_devices
from elastic.estimation.kv_room import KVBlockCapacity, check_kv_form
from elastic.estimation.model_layout import ModelLayout, layout_of
from elastic.estimation.profile import CostProfile
from elastic.estimation.weight_pages import WeightPages, variant_config
from elastic.estimation.work import activation_bytes, copied_share, copies_blocks, read_bytes
from elastic.planning.deployment.placing import MOST_REQUESTS
from elastic.planning.estimate.configuration import FULL, Configuration, configurations, named_forms
from elastic.planning.estimate.devices import PAGE_BYTES, Device
from elastic.planning.estimate.intent import Intent, Objective
from elastic.planning.estimate.paper import OUTPUTS, Latency, MemoryParts, estimate_by_parts
from elastic.planning.estimate.performance import USUAL_LOAD, InstanceCost, Load
from elastic.planning.estimate.ranking import (
    UNKNOWN_SECONDS,
    Candidate,
    Estimate,
    RankBytes,
    ordered,
    rank,
    within_bounds,
)
from elastic.planning.estimate.roofline import BatchCost
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.planning.sharding.share import even_stages
from elastic.quant.formats.base import KernelTarget
from elastic.quant.variants.variant import NAMED, config_of
from elastic.weights.decoder import batch_context_length

Method = Literal["ours", "paper"]
WEIGHTS = (FULL, "int8", "int4", "2:4")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
KV_INT8 = f"KV {INT8}"
"""What `losses` call keys and values in 8 bits."""
_PACKED = "layers in a variant are not shared by ranks: packed matrices are not cut in this version; use stages"
EXCHANGES = 2
"""For each layer that ranks share: heads are gathered, and what the feed-forward network gives is added up."""


def estimate(
    model: Any,
    devices: str | Sequence[str | Device],
    *,
    load: Load | None = None,
    weights: Sequence[str] = WEIGHTS,
    kv: Sequence[str] = (FULL,),
    intent: Intent | Objective = "cost",
    kind: str | None = None,
    profile: CostProfile | None = None,
    dtype: torch.dtype | None = None,
    step_tokens: int = 512,
    block_tokens: int | None = None,
    prefetch_buffers: int = 0,
    planned: bool = False,
    losses: Mapping[str, float] | None = None,
    method: Method = "ours",
) -> tuple[Estimate, ...]:
    """Rank the configurations of a model on devices: those that fit by what is to be small, then the others with why.

    `model` is a directory, of which `config.json` is enough, a config, or a model; no weights are read. `devices` are
    places ("cuda:0=80GiB", of the data sheet `kind`) or data sheets ("8*h100", "2*a6000=40GiB"), separated by commas in
    text. A size is all that the model may have there, with what batches take. The space is TP x PP x `weights` (FULL,
    or names of variants, pruned ones too) x `kv` (FULL or "int8"). `load` are the requests (default: one at a time, of
    512 tokens that get 128). `profile`: measured fingerprints; None: rates of data sheets, no less than which it takes.
    `dtype`: None is the model's own, on CPUs float32, as it would be loaded. `step_tokens` and `block_tokens` are those
    of the engine, `prefetch_buffers` what `wrap` keeps for released layers (1 without a policy). `planned`: estimate as
    well what this version cannot run. `intent`: what is to be small, or an `Intent` with bounds; what misses one does
    not fit. `losses`: by how much each form raises the mean loss of a token, as `{"int4": 0.03, "KV int8": 0.001}`.
    `method`: "paper" has the paper's equations instead, which know one request at a time, and bytes of all ranks
    together: `ranks` is empty then, `tokens_s` and `rate` are not a number. Raises `ConfigError` for what cannot be
    estimated, and for a rate, or a form of keys and values, by the paper's method.
    """
    weights, kv = named_forms(weights, "weights"), named_forms(kv, "kv")
    require(load is None or isinstance(load, Load), "load", load, "an elastic.Load, or None")
    require(isinstance(profile, CostProfile | None), "profile", profile, "measured fingerprints, or None")
    require(dtype is None or dtype in DTYPES, "dtype", dtype, "a floating point dtype, such as torch.bfloat16, or None")
    require_flag(planned, "planned")
    _check_method(method, load or USUAL_LOAD, kv)
    available = parse_devices(devices, kind)
    layout = layout_of(model, torch.float32 if dtype is None and available[0].kind.type == "cpu" else dtype)
    estimator = Estimator(
        layout,
        available,
        load or USUAL_LOAD,
        step_tokens,
        block_tokens,
        prefetch_buffers,
        profile,
        planned,
        {} if losses is None else losses,
    )
    space = estimator.space(weights, kv)
    if method == "ours":
        return rank(estimator.candidates(space), estimator.load, intent)
    return ordered([within_bounds(each, Intent.of(intent)) for each in estimator.by_paper(space)], Intent.of(intent))


@dataclass
class Estimator:
    """What configurations of one model on some devices need, one at a time."""

    layout: ModelLayout
    devices: Sequence[Device]
    load: Load
    step_tokens: int
    block_tokens: int | None
    prefetch_buffers: int = 0
    profile: CostProfile | None = None
    planned: bool = False
    losses: Mapping[str, float] = field(default_factory=dict)
    any_model: bool = False
    """Take also a model that the engine refuses, for its shapes."""

    def __post_init__(self) -> None:
        """Sort the devices, those with the most memory first. Raises `ConfigError` for unlike kinds."""
        check_losses(self.losses)
        require_whole(self.step_tokens, "step_tokens")
        require_whole(self.prefetch_buffers, "prefetch_buffers", least=0)
        if self.block_tokens is not None:
            require_whole(self.block_tokens, "block_tokens")
        kinds = {device.kind.name for device in self.devices}
        if len(kinds) != 1:
            names = ", ".join(sorted(kinds))
            raise ConfigError(f"devices of kinds {names}: estimates are of devices of one kind: ask for each by itself")
        config = self.layout.decoder.config
        most = batch_context_length(config)
        if most and self.load.tokens > most:
            raise ConfigError(
                f"requests of {self.load.tokens} tokens are longer than the {most} that the model was made for"
            )
        self.devices = sorted(self.devices, key=lambda device: -device.memory_bytes)
        kind = self.devices[0].kind
        sheet = KernelTarget(kind.type, kind.instructions)
        target = sheet if kind.instructions else KernelTarget.of(torch.device(kind.type))
        self.pages = WeightPages(self.layout, PAGE_BYTES[kind.type], target)
        self.room = cache(partial(KVBlockCapacity, config, self.block_tokens, PAGE_BYTES[kind.type]))
        self._activations = cache(partial(activation_bytes, self.layout, self.step_tokens, context=self.load.tokens))
        self.costs = costs_of(self.pages, kind, self.profile)

    def space(self, weights: Sequence[str], kv: Sequence[str]) -> Iterator[Configuration]:
        """Yield all configurations on the devices. Raises `ConfigError` for an unknown variant or form."""
        for name in weights:
            if name != FULL:
                variant_config(name)
        for name in kv:
            check_kv_form(name)
        return configurations(len(self.devices), len(self.layout.decoder.layers), weights, kv)

    def candidates(self, space: Iterator[Configuration]) -> Iterator[Candidate]:
        """Yield what is known of each configuration; of one that cannot be, the reason."""
        for configuration in space:
            try:
                yield self.candidate(configuration)
            except ConfigError as error:
                why_not = self.refusal(configuration) or str(error)
                yield Candidate(configuration, self.stages(configuration), (), 0, 0, None, self.costs.basis, why_not)

    def by_paper(self, space: Iterator[Configuration]) -> Iterator[Estimate]:
        """Yield what the paper's methods say of each configuration; of one of which they say nothing, the reason."""
        basis = self.costs.basis
        for configuration in space:
            stages, loss = self.stages(configuration), self.quality_loss(configuration)
            why_not = self.refusal(configuration)
            try:
                memory, latency = self.memory_parts(configuration), self.paper_latency(configuration)
            except ConfigError as error:
                yield Estimate(configuration, stages, (), basis, why_not or str(error), 0, quality_loss=loss)
                continue
            estimate = estimate_by_parts(configuration, stages, self.devices, self.load, memory, latency)
            yield replace(estimate, basis=basis, why_not=why_not or estimate.why_not, quality_loss=loss)

    def memory_parts(self, configuration: Configuration) -> MemoryParts:
        """Return the parts of the footprint in a form, solved at (TP, PP) = (1, 1), (1, 2) and (2, 1): methods M1, M2.

        Footprints are counted, and linear in the layers, so a model's are those that its fingerprints tell. What is
        not cut, or not in stages, is not counted so.
        """
        plain = self.footprint(replace(configuration, tp=1, pp=1))
        two_stages = self.footprint(replace(configuration, tp=1, pp=2)) if configuration.pp > 1 else plain
        two_parts = self.footprint(replace(configuration, tp=2, pp=1)) if configuration.tp > 1 else plain
        return MemoryParts.solve(plain, two_stages, two_parts)

    def footprint(self, configuration: Configuration) -> int:
        """Return the bytes of all ranks of even stages without keys and values. Raises `ConfigError` as `rank` does."""
        held = (self.rank(self.devices[0], layers, configuration, 1).used for layers in self.stages(configuration))
        return configuration.tp * sum(held)

    def paper_latency(self, configuration: Configuration) -> Latency:
        """Return TTFT and TPOT of one request without stages, solved at two outputs: methods L1 and L2.

        Seconds of an output are those of its batches, which are linear in the layers. Raises `ConfigError` where these
        are not known.
        """
        plain = replace(configuration, pp=1)
        cost = self.instance_cost(plain, self.stages(plain))
        if cost is None:
            raise ConfigError(UNKNOWN_SECONDS)
        first_s, prompt = cost.ttft_s(self.load), self.load.prompt
        steps_s = [cost.pass_s([Chunk("", prompt + number, 1)]) for number in range(max(OUTPUTS) - 1)]
        short, long = ((tokens, first_s + math.fsum(steps_s[: tokens - 1])) for tokens in OUTPUTS)
        return Latency.solve(short, long)

    def candidate(self, configuration: Configuration) -> Candidate:
        """Return what is known of a configuration, in even stages on the devices with the most memory.

        Raises `ConfigError` where the model cannot be cut or packed so.
        """
        return self.candidate_on(configuration, self.stages(configuration), self.devices, MOST_REQUESTS)

    def stages(self, configuration: Configuration) -> tuple[range, ...]:
        """Return the layers of each stage, where these are even."""
        return even_stages(len(self.layout.decoder.layers), configuration.pp)

    def candidate_on(
        self, configuration: Configuration, stages: Sequence[range], devices: Sequence[Device], most_requests: int
    ) -> Candidate:
        """Return what is known of a configuration in such stages on devices, the ranks that share one side by side."""
        tp, kv = configuration.tp, self.layout.kv_shape(configuration.kv)
        rooms = [self.room(kv, tp, layers) for layers in stages]
        held = cache(partial(self.ranks, configuration, stages, rooms, devices))
        more = range(2, min(held(1)[1], most_requests) + 1)
        # a batch of more requests has more logits, which leave room for fewer
        running = 1 + bisect_left(more, True, key=lambda running: held(running)[1] < running)
        ranks, requests = held(running)
        return Candidate(
            configuration,
            tuple(stages),
            ranks,
            min(requests, running),
            sum(tp * self.request_bytes(room, configuration, each) for room, each in zip(rooms, stages, strict=True)),
            self.instance_cost(configuration, stages),
            self.costs.basis,
            self.refusal(configuration),
            self.quality_loss(configuration),
            partial(self.activations, configuration),
        )

    def need(self, configuration: Configuration, layers: range, requests: int) -> int:
        """Return the bytes that a rank with some layers must have to run so many requests of the load at a time.

        Raises `ConfigError` where these layers cannot be cut or packed so.
        """
        room = self.room(self.layout.kv_shape(configuration.kv), configuration.tp, layers)
        kept = room.pages(requests, self.load.tokens) * self.pages.page_bytes
        share = self.copied_share(configuration, layers)
        held = self.rank(Device("", self.devices[0].kind, 0), layers, configuration, requests)
        return held.used + math.ceil(kept / (1 - share)) + 1  # a share of a whole number of bytes is rounded down

    def refusal(self, configuration: Configuration) -> str:
        """Say why this version cannot run a configuration; "": it can, or what is planned is estimated as well."""
        if self.planned:
            return ""
        refused = "" if self.any_model else self.layout.refusal
        return refused or (_PACKED if configuration.tp > 1 and configuration.weights != FULL else "")

    def quality_loss(self, configuration: Configuration) -> float | None:
        """Return by how much the mean loss of a token rises; None where it was not said of a form."""
        losses = [self.losses.get(name) for name in configuration.compressed]
        return math.fsum(loss for loss in losses if loss is not None) if None not in losses else None

    def ranks(
        self,
        configuration: Configuration,
        stages: Sequence[range],
        rooms: Sequence[KVBlockCapacity],
        devices: Sequence[Device],
        running: int,
    ) -> tuple[tuple[RankBytes, ...], int]:
        """Return what each rank holds with so many requests in a batch, and the requests that all have room for.

        Ranks that are alike are counted once.
        """
        tp, keys = configuration.tp, list[tuple[object, ...]]()
        counted: dict[tuple[object, ...], tuple[RankBytes, int]] = {}
        for number, (layers, room) in enumerate(zip(stages, rooms, strict=True)):
            for device in devices[number * tp : (number + 1) * tp]:
                key = device.memory_bytes, self.layout.kind_of[layers.start : layers.stop], room.groups
                keys.append(key)
                if key not in counted:
                    held = self.rank(device, layers, configuration, running)
                    counted[key] = held, room.requests(held.kv // self.pages.page_bytes, self.load.tokens)
        ranks = (replace(counted[key][0], device=device.name) for key, device in zip(keys, devices, strict=False))
        return tuple(ranks), min(requests for _, requests in counted.values())

    def rank(self, device: Device, layers: range, configuration: Configuration, running: int) -> RankBytes:
        """Return what a rank holds of some layers. Raises `ConfigError` where these cannot be cut or packed so."""
        page = self.pages.page_bytes
        fixed = self.pages.fixed * page
        own = self.pages.layers(layers, configuration.weights, configuration.tp) * page
        staging = self.pages.staging(configuration.weights, self.prefetch_buffers) * page
        batch = self.activations(configuration, running)
        left = device.memory_bytes - fixed - own - staging - batch
        copied = int(self.copied_share(configuration, layers) * left) if left > 0 else 0
        return RankBytes(device.name, device.memory_bytes, fixed, own, staging, batch, copied)

    def activations(self, configuration: Configuration, running: int) -> int:
        """Return what batches of so many requests take at a rank, but for what decode steps copy."""
        nbytes, form = self._activations(running), configuration.form
        if self.profile is not None and form in self.profile.activations:
            nbytes = int(self.profile.activations[form] * nbytes) + self.profile.scratch_bytes.get(form, 0)
        threads = configuration.pp if self.devices[0].kind.type == "cpu" else 1  # each keeps memory of its own there
        return threads * nbytes

    def request_bytes(self, room: KVBlockCapacity, configuration: Configuration, layers: range) -> int:
        """Return the keys and values of one request at a rank of a stage, with what decode steps copy of it."""
        share = self.copied_share(configuration, layers)
        return round(room.request_bytes(self.load.tokens) / (1 - share))

    def copied_share(self, configuration: Configuration, layers: range) -> float:
        """Return the share of a rank's room for keys and values that decode steps of some layers copy."""
        if not copies_blocks(self.layout, self.devices[0].kind.type):
            return 0.0
        return copied_share(len(layers), read_bytes(configuration.kv, self.layout.dtype.itemsize))

    def instance_cost(self, configuration: Configuration, stages: Sequence[range]) -> InstanceCost | None:
        """Return the seconds of an instance's batches; None where they were not measured."""
        tp, ranks = configuration.tp, configuration.tp * len(stages)
        try:
            parts = self.costs.parts(configuration.weights, self.layout.kv_shape(configuration.kv), tp)
        except ConfigError:
            if self.profile is None:
                raise
            return None
        link = self.costs.link
        # each rank sends its heads to all others, and a sum of full width: the mean of the two
        exchange = LinearLatency(link.fixed_s, link.each_s * (tp - 1) * (1 + 1 / tp) / 2)
        return InstanceCost(
            self._stage_costs(stages, parts, ranks, tp - 1),
            tuple(EXCHANGES * len(stage) if tp > 1 else 0 for stage in stages),
            exchange,
            link,
            self.layout.decoder.config.hidden_size * self.layout.dtype.itemsize,
            self.step_tokens,
            self._stage_costs(stages, parts, ranks, ranks - 1) if len(stages) > 1 else (),
            self.costs.handovers,
        )

    def _stage_costs(
        self, stages: Sequence[range], parts: Parts, ranks: int, others: int
    ) -> tuple[tuple[tuple[BatchCost, int], ...], ...]:
        """Return the costs of each stage, while so many other ranks compute; of the last, of what is around, too."""
        among = partial(among_ranks, ranks=ranks, contention=others * self.costs.contention)
        layers, rest = parts
        each = {name: among(cost) for name, cost in layers.items()}
        kinds = [Counter(self.layout.kind_of[layer].name for layer in stage) for stage in stages]
        costs = [tuple((each[name], count) for name, count in counts.items()) for counts in kinds]
        return (*costs[:-1], (*costs[-1], (among(rest), 1)))


def _check_method(method: str, load: Load, kv: Sequence[str]) -> None:
    """Raise `ConfigError` for an unknown method, and for what the paper's methods do not know."""
    if method not in get_args(Method):
        raise ConfigError(f"method={method!r} is not known; use one of {', '.join(get_args(Method))}")
    if method == "ours":
        return
    if load.rate:
        raise ConfigError(
            f"method='paper' knows one request at a time, and no rate of {load.rate:g} a second; leave the rate out"
        )
    if tuple(kv) != (FULL,):
        raise ConfigError(f"method='paper' counts no keys and values, and knows no kv={', '.join(kv)}; leave it out")


def check_losses(losses: Mapping[str, float]) -> None:
    """Raise `ConfigError` for losses that are no numbers of 0 or more, or not of a form of weights, or of the cache."""
    require(isinstance(losses, Mapping), "losses", losses, "numbers by form, such as {'int4': 0.03}")
    for form, loss in losses.items():
        if not isinstance(form, str) or (form != KV_INT8 and config_of(form) is None):
            raise ConfigError(f"losses: {form!r} is not known; use {KV_INT8!r} or one of {NAMED}")
        require(is_number(loss) and loss >= 0, f"losses: {form}", loss, "0 or more nats a token")
