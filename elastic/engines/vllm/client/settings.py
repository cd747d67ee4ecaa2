"""The settings of an elastic vLLM engine, checked where the user gives them, and carried to every worker as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.config import MODES, SLO, Policy, parse_bytes
from elastic.errors import ConfigError, require, require_path, require_path_or_none, require_whole

KEY = "elastic"
"""Of ours in vLLM's `additional_config`."""
CONNECTOR = {
    "kv_connector": "ElasticConnector",
    "kv_connector_module_path": "elastic.engines.vllm.connector",
    "kv_role": "kv_both",
}
SCHEDULER = "elastic.engines.vllm.scheduler.ElasticScheduler"


@dataclass(frozen=True)
class EngineSettings:
    """What a worker is told."""

    budget_bytes: int
    """Of each rank: weights, KV cache, and the buffers between them; not activations."""
    policy: str | dict[str, Any] = "manual"
    """A name or file of a policy, or the fields of an `elastic.Policy`."""
    variants: tuple[str, ...] = ()
    order: str = "front_to_back"
    slo: dict[str, float | None] | None = None
    variant_cache: str | None = None
    copy_rate: int | str | None = None
    page_bytes: int | None = None
    """None: 64 KiB on a CPU, the driver's granularity on CUDA."""

    def __post_init__(self) -> None:
        """Check what `wrap` would check. Raises `ConfigError`."""
        from elastic.runtime.options import parse_rate

        require_whole(self.budget_bytes, "budget")
        if self.page_bytes is not None:
            require_whole(self.page_bytes, "page_bytes")
        object.__setattr__(self, "variants", _check_variants(self.variants))
        parse_rate(self.copy_rate)
        object.__setattr__(self, "order", _check_order(self.order))
        cache = self.variant_cache
        require(cache is None or not Path(cache).is_file(), "variant_cache", cache, "a directory, not a file")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {**dataclasses.asdict(self), "variants": list(self.variants)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> EngineSettings:
        """Undo `to_json`."""
        return cls(**{**fields, "variants": tuple(fields["variants"])})

    def to_policy(self) -> str | Policy:
        """Return the policy as `choose_policy` takes it."""
        if isinstance(self.policy, str):
            return self.policy
        return Policy(**{**self.policy, **{k: tuple(v) for k, v in self.policy.items() if isinstance(v, list)}})


def options(
    budget: int | str,
    *,
    policy: str | Path | Policy = "manual",
    variants: Sequence[str] = (),
    order: str | Path = "front_to_back",
    slo: SLO | None = None,
    variant_cache: str | Path | None = None,
    copy_rate: int | str | None = None,
    page_bytes: int | str | None = None,
    promise: bool = True,
    move_blocks: bool = True,
    connector: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments that make a vLLM engine elastic: `LLM(path, **elastic.vllm.options("30GiB"))`.

    `budget` is what weights and KV cache of each rank share, such as "30GiB". `policy` "manual": you call actions.
    "accuracy", "balanced", "performance", a `Policy` or its file: a controller swaps layers to `variants` under
    pressure, in an `order`, and restores them after it, with `slo` in view. `variant_cache` is a directory that keeps
    packed layers for the next start; `copy_rate` bounds the bytes a second that move while the model computes;
    `page_bytes` is the size of a page, as of a `Place`: on a CPU "2MiB" for large models.

    With `promise`, a request is let in when all that live can still end without preempting any; else as vLLM does.
    With `move_blocks`, blocks of live requests move out of the way of a KV cache that shrinks. `connector` is a user's
    own KV connector, as in vLLM's `kv_transfer_config`; it works beside ours. A scheduler class of your own takes the
    place of "scheduler_cls" in what is returned; then none move, unless it derives from ours.

    Raises `ConfigError` for what cannot work, `BackendUnavailable` where vLLM is absent or not known.
    """
    from elastic.engines.vllm.support import require_vllm, worker_name

    require_vllm()
    require(slo is None or isinstance(slo, SLO), "slo", slo, "an elastic.SLO, or None")
    cache = require_path_or_none(variant_cache, "variant_cache")
    for option, value in (("promise", promise), ("move_blocks", move_blocks)):
        require(isinstance(value, bool), option, value, "True or False")
    settings = EngineSettings(
        budget_bytes=parse_bytes(budget, option="budget"),
        policy=_check_policy(policy, variants),
        variants=tuple(_names(variants)),
        order=str(order),
        slo=None if slo is None else dataclasses.asdict(slo),
        variant_cache=None if cache is None else str(cache.resolve()),
        copy_rate=copy_rate,
        page_bytes=None if page_bytes is None else parse_bytes(page_bytes, option="page_bytes"),
    )
    return {
        "quantization": "elastic",
        "worker_cls": worker_name(),
        "scheduler_cls": SCHEDULER,
        "kv_transfer_config": _transfer(connector, promise=promise, move_blocks=move_blocks),
        "additional_config": {KEY: settings.to_json()},
    }


def _transfer(connector: Mapping[str, Any] | None, **ours_extra: bool) -> dict[str, Any]:
    """Return the config of our connector, or of vLLM's `MultiConnector` over ours and the user's."""
    from elastic.engines.vllm.kv.orders import refuse_connector

    ours = {**CONNECTOR, "kv_connector_extra_config": ours_extra}
    if connector is None:
        return ours
    refuse_connector(connector)
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, dict(connector)]},
    }


def _check_policy(policy: str | Path | Policy, variants: Sequence[str]) -> str | dict[str, Any]:
    if isinstance(policy, Policy):
        return dataclasses.asdict(policy)
    name = str(policy)
    if name == "manual":
        return name
    if name not in MODES and Path(name).suffix not in (".toml", ".json"):
        names = ", ".join(map(repr, ("manual", *MODES)))
        raise ConfigError(f"policy={name!r} is not known in vLLM; use one of {names}, an elastic.Policy, or its file")
    if not variants:
        raise ConfigError(f"policy={name!r} swaps layers and needs variants to swap to, such as variants=('int4',)")
    return name if name in MODES else dataclasses.asdict(Policy.from_file(name))


def _check_variants(variants: Sequence[str]) -> tuple[str, ...]:
    from elastic.quant.formats.pruned import Pruned
    from elastic.quant.variants.variant import Variant
    from elastic.runtime.options import parse_variants

    names = _names(variants)
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"variants: {name!r} cannot be used in vLLM, whose workers round the weights that they have loaded; "
                "give a name: 'int8', 'int4' or 'int3'"
            )
        if isinstance(Variant.parse(name).config, Pruned):
            raise ConfigError(
                f"variants: {name!r} is pruned, which cannot be used in vLLM, whose layers hold several matrices in "
                "one and may be split over ranks; give 'int8', 'int4' or 'int3'"
            )
    parse_variants(names)  # none twice
    return tuple(names)


def _names(variants: Sequence[str]) -> list[str]:
    names = [variants] if isinstance(variants, str) else variants
    require(isinstance(names, list | tuple), "variants", variants, "a sequence of names, such as ('int4',)")
    return list(names)


def _check_order(order: str) -> str:
    """Return an order's name, or its file as every worker finds it. Raises `ConfigError` for what is neither."""
    from elastic.quant.sensitivity.order import order as order_of

    if Path(order).suffix != ".json":
        order_of(order, 1)
        return order
    path = require_path(order, "order").resolve()
    require(path.is_file(), "order", order, "a name, or the file of a profile")
    return str(path)
