"""The options of `elastic serve` that make a fleet."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from elastic.cli.inputs.checks import refuse, require_at_least
from elastic.cli.inputs.exchange_options import EXCHANGE, add_exchange, exchange_form, read_numbers
from elastic.config import Lengths, Overload, Place
from elastic.engines.base import GrammarCompiler
from elastic.errors import ConfigError
from elastic.planning.sharding.share import shares

if TYPE_CHECKING:
    from elastic.cluster.fleet.fleet import Fleet
    from elastic.cluster.fleet.planning.policies import FleetPolicy
    from elastic.cluster.launch.base import Launcher

LAUNCHERS = ("local", "in-process", "join", "ray")
BULK = ("sockets", "nixl")
ROUTINGS = ("prefix", "freeness", "least_load", "round_robin")
_OF_POLICIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("overload", *EXCHANGE), ("drop",)),
    "lengths": ("lengths",),
    "layers_per_step": ("drop", "lengths"),
}
"""Options of one policy, or of either."""
_ALONE = ("launch", "listen", "key_file", "balance", "routing", "cores", "bulk", "tp", "pp", *_OF_POLICIES)
"""Options that mean nothing without `--ranks`."""
ENGINE = ("kv_cache_dtype", "enforce_eager", "cuda_graphs")
"""Options of `ContinuousEngine` that commands have under the same names."""
_OF_RANKS = ("place", "cores", "dtype", "variants", "prepack", *ENGINE)
"""Options that a rank has which comes by itself."""
FLEET_POLICIES = {
    "drop": "instances that drop layers when KV runs out",
    "lengths": "instances that share their layers when requests need it",
}
"""Policies that a fleet has, not its ranks, and what they are for."""


def add_fleet(command: ArgumentParser) -> None:
    """Add the options of a fleet."""
    group = command.add_argument_group(
        "a fleet", "several processes that serve the model; --place is then given once for each rank, or once for all"
    )
    group.add_argument("--ranks", type=int, metavar="N", help="processes (none: the model is in this one)")
    group.add_argument("--launch", choices=LAUNCHERS, help="what starts them (local)")
    group.add_argument("--listen", metavar="HOST:PORT", help="with --launch join: where ranks join (a free port here)")
    group.add_argument("--key-file", metavar="FILE", help="with --launch join: the key that ranks must know")
    group.add_argument("--balance", action="store_true", help="move requests to where there is more room")
    group.add_argument("--routing", choices=ROUTINGS, help="which rank a request goes to (prefix)")
    group.add_argument(
        "--cores", action="append", metavar="N,N", help="CPU cores of a rank, such as 0,1; once for each rank"
    )
    group.add_argument(
        "--tp",
        metavar="N",
        help="ranks that share each layer from the beginning, with no more than their part of the weights (1); with "
        "--policy lengths: how many share them at the most, as 1..4 (1..4)",
    )
    group.add_argument(
        "--pp", metavar="N", help="stages of the model from the beginning, or the layers of each, as 6,10 (1)"
    )
    group.add_argument("--bulk", choices=BULK, help="how ranks read each other's memory where no file is (sockets)")
    for name, policy in (("overload", "drop"), ("lengths", "lengths")):
        group.add_argument(
            f"--{name}",
            action="append",
            metavar="NAME=VALUE",
            help=f"with --policy {policy}: a number of elastic.{name.capitalize()}; repeatable",
        )
    add_exchange(command, "with --policy drop; --layers-per-step with lengths, too")


def check_fleet(options: Namespace) -> None:
    """Raise `ConfigError` for options of a fleet that cannot work together.

    Without `--ranks` there are as many as have the model together.
    """
    tp, pp = together(options)
    if options.ranks is None and (together_ranks := len(shares(tp, pp))) > 1:
        options.ranks = together_ranks
    if options.ranks is None:
        refuse(options, _ALONE, "is for a fleet; say how many processes: --ranks N")
        if fleet_policies(options):
            raise ConfigError(
                f"--policy {options.policy} is for a fleet of two ranks at least; say how many: --ranks N"
            )
        return
    require_at_least(1, options.ranks, "--ranks")
    if options.launch != "join":
        refuse(options, ("listen", "key_file"), "is for ranks that come by themselves: --launch join")
    elif not options.key_file:
        raise ConfigError("--launch join needs --key-file FILE: whoever knows the key may serve")
    else:
        refuse(options, _OF_RANKS, "is not sent to ranks that join: give it to elastic rank")
    for name, of in _OF_POLICIES.items():
        if not set(of).intersection(fleet_policies(options)):
            what = ", or ".join(f"{FLEET_POLICIES[policy]}: --policy {policy}" for policy in of)
            refuse(options, [name], f"is for {what}")
    if ".." in (options.tp or "") and "lengths" not in fleet_policies(options):
        raise ConfigError(f"--tp is for {FLEET_POLICIES['lengths']}: --policy lengths")
    _policies(options)
    _by_rank(options.place or [], options.ranks)
    _cores(options)
    for place in options.place or []:
        Place.parse(place)


def together(options: Namespace) -> tuple[int, int | tuple[int, ...]]:
    """Return how many ranks share each layer, and the stages, from the beginning. Raises `ConfigError`."""
    tp, pp = options.tp or "1", options.pp or "1"
    if not tp.replace("..", "").isdecimal():
        raise ConfigError(f"--tp {tp!r} is no number of ranks, as 2, and no range of them, as 1..4")
    counts = pp.split(",")
    if not all(count.isdecimal() for count in counts):
        raise ConfigError(f"--pp {pp!r} is no number of stages, as 2, and not the layers of each, as 6,10")
    layers = tuple(map(int, counts))
    return (1 if ".." in tp else int(tp)), (layers if len(layers) > 1 else layers[0])


def fleet_policies(options: Namespace) -> tuple[str, ...]:
    """Return what `--policy` says of a fleet: one of `FLEET_POLICIES`, or both; (): it is for each rank."""
    named = tuple((options.policy or "").split(","))
    return named if set(named) <= FLEET_POLICIES.keys() else ()


def engine_options(options: Namespace) -> dict[str, Any]:
    """Return the options of `ContinuousEngine` that a command was given."""
    return {name: getattr(options, name) for name in ENGINE}


def make_fleet(
    options: Namespace, launcher: str | Launcher, wrap: Mapping[str, Any], grammars: GrammarCompiler | None
) -> Fleet:
    """Make the fleet, not started yet."""
    from elastic.cluster.fleet.fleet import Fleet

    engine = engine_options(options)
    tp, pp = together(options)
    if grammars is not None:
        engine["grammars"] = "llguidance"  # each rank compiles them for itself
    return Fleet(
        os.path.abspath(options.model),
        ranks=_by_rank(options.place or [], options.ranks),
        cores=_cores(options),
        launch=launcher,
        engine=engine,
        dtype=options.dtype or "auto",
        shards=options.shards,
        tp=tp,
        pp=pp,
        wrap={name: value for name, value in wrap.items() if name not in ("places", "shards")},
        policy=_policies(options),
        routing=options.routing or "prefix",
        max_queue=options.max_queue,
        grammars=grammars,
        bulk=options.bulk or "sockets",
    )


def _policies(options: Namespace) -> list[FleetPolicy]:
    chosen: list[FleetPolicy] = ["balance"] if options.balance else []
    named = fleet_policies(options)
    if "drop" in named:
        chosen.append(read_numbers(Overload, options.overload or [], "--overload", **exchange_form(options)))
    if "lengths" in named:
        chosen.append(_lengths(options))
    return chosen


def _lengths(options: Namespace) -> Lengths:
    """Return the policy of lengths as `--tp` and `--lengths` have it. Raises `ConfigError`."""
    numbers, more = options.lengths or [], {"layers_per_step": options.layers_per_step}
    if options.tp is None:
        return read_numbers(Lengths, numbers, "--lengths", **more)
    least, dots, most = options.tp.partition("..")
    if least != "1" or not dots or not most.isdecimal():
        raise ConfigError(f"--tp {options.tp!r} is no range of ranks; write 1..2 or 1..4: all begin by themselves")
    if options.shards is not None and int(most) > options.shards:
        raise ConfigError(f"--tp {options.tp}: layers are cut in {options.shards}; give --shards {most}")
    return read_numbers(Lengths, numbers, "--lengths", most_ranks=int(most), **more)


def read_configs(path: str) -> tuple[Any, Any]:
    """Return the tokenizer of a model directory, and its configurations under the names that a model has them by."""
    from transformers import GenerationConfig

    from elastic.model_files import read_config, read_tokenizer

    config = read_config(path, option="MODEL")
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # there is none: transformers makes one of the model's config
        generation = GenerationConfig.from_model_config(config)
    return read_tokenizer(path, option="MODEL"), SimpleNamespace(config=config, generation_config=generation)


def make_launcher(options: Namespace) -> str | Launcher:
    """Return what starts the ranks: a local one begins to import what they need at once."""
    if options.launch in (None, "local"):
        from elastic.cluster.launch.local import LocalLauncher

        local = LocalLauncher(options.ranks)
        local.warm_up()
        return local
    if options.launch != "join":
        return str(options.launch)
    from elastic.cluster.control.listener import parse_address
    from elastic.cluster.launch.join import JoinLauncher

    host, port = parse_address(options.listen or "127.0.0.1:0", option="--listen")
    launcher = JoinLauncher(options.key_file, host=host, port=port)
    where = f"{launcher.address[0]}:{launcher.address[1]}"
    count = f"{options.ranks} ranks" if options.ranks > 1 else "a rank"
    print(f"waiting for {count}: elastic rank MODEL --join {where} --key-file FILE", flush=True)
    return launcher


def _by_rank(places: Sequence[str], ranks: int) -> list[list[str]]:
    """Share places out: as many to each rank; one place alone is what each has."""
    if len(places) <= 1:
        return [list(places) for _ in range(ranks)]
    if len(places) % ranks:
        raise ConfigError(
            f"--place, given {len(places)} times, cannot be shared out to --ranks {ranks}; give one for each"
        )
    each = len(places) // ranks
    return [list(places[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _cores(options: Namespace) -> list[tuple[int, ...]]:
    cores = []
    for text in options.cores or []:
        if not all(number.strip().isdecimal() for number in text.split(",")):
            raise ConfigError(f"--cores {text!r} is no list of CPU cores; write 0,1")
        cores.append(tuple(int(number) for number in text.split(",")))
    if cores and len(cores) != options.ranks:
        raise ConfigError(f"--cores, given {len(cores)} times, is for --ranks {options.ranks}; give one for each")
    return cores
