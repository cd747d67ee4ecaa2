"""The options of `elastic serve` that deploy its model by an intent, and let others be deployed beside it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from elastic.cli.inputs.checks import refuse
from elastic.cli.inputs.intent_options import add_intent, add_load, add_losses, intent_of, load_of, losses_of, names_of
from elastic.planning.deployment.policies import THETA

if TYPE_CHECKING:
    from elastic.cluster.deployment.deployments import Deployments

_ALONE = (
    "intent",
    "latency",
    "cost",
    "quality_loss",
    "tolerance",
    "losses",
    "kind",
    "place_by",
    "weights",
    "theta",
    "rate",
    "prompt",
    "new_tokens",
    "replicas",
    "harvest",
)
"""Options that mean nothing without `--devices`."""
_NOT_WITH = (
    "ranks", "place", "dtype", "variants", "policy", "shards", "prepack", "cores", "max_queue", "slo_ttft", "slo_tpot"
)  # fmt: skip
"""Those that a deployment chooses, or does not have."""


def add_deployments(command: ArgumentParser) -> None:
    """Add the options of deployments."""
    group = command.add_argument_group(
        "deployments", "the configuration is chosen by an intent, and changes with it; models are deployed beside it"
    )
    group.add_argument(
        "--devices", metavar="DEVICES", help="what all models may have: cuda:0=80GiB,cuda:1=80GiB, or cpu#a=1GiB"
    )
    group.add_argument("--kind", metavar="NAME", help="the data sheet of cuda:N, such as h100")
    group.add_argument("--weights", metavar="NAMES", help="forms that models may have (full, and those in --losses)")
    group.add_argument(
        "--replicas", metavar="N", help="instances that share its requests, or 1-4: that follow the load (1)"
    )
    group.add_argument(
        "--place-by", choices=("hybrid", "packing", "least-loaded"), help="which devices are tried first (hybrid)"
    )
    group.add_argument("--theta", type=float, metavar="X", help=f"load from which on hybrid spreads ({THETA})")
    group.add_argument("--harvest", action="store_true", help="measure models on devices that have little to do")
    add_load(group)
    add_intent(command)
    add_losses(command)


def check_deployments(options: Namespace) -> None:
    """Raise `ConfigError` for options that cannot work together."""
    if options.devices is None:
        refuse(options, _ALONE, "is for deployments; say on what: --devices DEVICES")
        return
    refuse(options, _NOT_WITH, "does not go with --devices: an intent chooses the configuration")
    intent_of(options)
    load_of(options)
    losses_of(options)


def make_deployments(options: Namespace) -> Deployments:
    """Make the deployments, with nothing deployed yet."""
    from elastic.cluster.deployment.deployments import Deployments

    kv = "full" if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    steps = {"enforce_eager": options.enforce_eager, "cuda_graphs": options.cuda_graphs}
    return Deployments(
        options.devices,
        kind=options.kind,
        policy=options.place_by or "hybrid",
        theta=THETA if options.theta is None else options.theta,
        weights=names_of(options.weights, "--weights") if options.weights is not None else None,
        kv=(kv,),
        losses=losses_of(options),
        fleet={"engine": {"grammars": "llguidance", **steps}},  # each rank compiles grammars for itself
        harvest=options.harvest,
    )
