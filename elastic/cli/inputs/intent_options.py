"""Options of `elastic estimate` and `elastic place`: devices, load, the space of configurations, and the intent."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import replace
from typing import Any, cast

from elastic.errors import ConfigError
from elastic.planning.deployment.policies import POLICIES, THETA
from elastic.planning.estimate.intent import Intent, Objective
from elastic.planning.estimate.performance import USUAL_LOAD, Load

PLANNED = "also what this version cannot run, such as models that the engine refuses"
OBJECTIVES = ("latency", "cost", "memory", "gpu-hours")


def add_estimate(command: ArgumentParser) -> None:
    """Add the model, the devices, the load, and the space of configurations."""
    command.add_argument("model", metavar="MODEL", help="model directory; config.json is enough without --profile")
    add_space(command)
    add_intent(command)
    add_losses(command)
    command.add_argument(
        "--profile", action="store_true", help="measure fingerprints of the model here; else rates of data sheets"
    )
    command.add_argument(
        "--method", choices=("ours", "paper"), default="ours", help="paper: by iServe's equations, to compare (ours)"
    )
    command.add_argument("--planned", action="store_true", help=PLANNED)
    command.add_argument(
        "--characterize",
        action="store_true",
        help="show what stages, shared layers and each form do by themselves, and how far apart all configurations are",
    )
    command.add_argument("--top", type=int, default=10, metavar="N", help="configurations to show (10)")
    command.add_argument("--json", action="store_true", help="print one JSON document, of all configurations")


def add_place(command: ArgumentParser) -> None:
    """Add the models, the devices, the load of each model, the intent and the policy."""
    command.add_argument(
        "models", nargs="+", metavar="MODEL", help="model directories, in the order of placing; config.json is enough"
    )
    add_space(command)
    add_intent(command)
    add_losses(command)
    command.add_argument(
        "--policy", choices=POLICIES, default="hybrid", help="which devices are tried first (%(default)s)"
    )
    command.add_argument(
        "--theta", type=float, default=THETA, metavar="X", help="load from which on hybrid spreads (%(default)s)"
    )
    command.add_argument(
        "--loads", default="", metavar="NAME=X,...", help="how busy devices are already, such as cuda:0=0.4"
    )
    command.add_argument("--planned", action="store_true", help=PLANNED)
    command.add_argument("--json", action="store_true", help="print one JSON document")


def add_space(command: ArgumentParser) -> None:
    """Add the devices, the load, and the forms of weights, keys and values."""
    command.add_argument(
        "--devices",
        required=True,
        metavar="DEVICES",
        help="such as 8*h100, 2*a6000=40GiB, cuda:0=80GiB,cuda:1=80GiB or cpu#a=1GiB",
    )
    command.add_argument("--kind", metavar="NAME", help="the data sheet of cuda:N, such as a100-80gb")
    add_load(command)
    command.add_argument(
        "--weights", metavar="NAMES", help="full, or names of variants, pruned ones too (full,int8,int4,2:4)"
    )
    command.add_argument("--kv", default="full", metavar="NAMES", help="full, int8 (full)")


def add_load(command: Any, *, as_before: bool = False) -> None:
    """Add the requests that there are to be, which are `as_before` where they are not said, or usual ones."""
    rate, prompt, new = 3 * ("as before",) if as_before else ("0: one request at a time", "512", "128")
    command.add_argument("--rate", type=float, metavar="X", help=f"requests a second ({rate})")
    command.add_argument("--prompt", type=int, metavar="N", help=f"tokens of each prompt ({prompt})")
    command.add_argument("--new-tokens", type=int, metavar="N", help=f"generated for each ({new})")


def said_load(options: Namespace) -> dict[str, Any]:
    """Return what was said of the requests, as fields of `Load`."""
    said = {"prompt": options.prompt, "new": options.new_tokens, "rate": options.rate}
    return {name: value for name, value in said.items() if value is not None}


def load_of(options: Namespace) -> Load:
    """Return the requests that there are to be. Raises `ConfigError` for what cannot be."""
    return replace(USUAL_LOAD, **said_load(options))


def add_intent(command: ArgumentParser) -> None:
    """Add what is to be small, and what may not be exceeded."""
    command.add_argument("--intent", choices=OBJECTIVES, help="what is to be small (cost; with --cost, latency)")
    command.add_argument("--latency", type=float, metavar="S", help="seconds that a request may take")
    command.add_argument("--cost", type=_gib_seconds, metavar="GIBS", help="what a request may cost, such as 40GiBs")
    command.add_argument("--quality-loss", type=float, metavar="X", help="nats a token that may be lost to compression")
    command.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="share above the least that is as good, for the sake of less memory, such as 0.05 (0)",
    )


def add_losses(command: ArgumentParser) -> None:
    """Add what forms lose of the quality, which intents bound."""
    command.add_argument(
        "--losses", default="", metavar="NAME=X,...", help="what forms lose, such as int4=0.03,KV int8=0.001"
    )


def intent_of(options: Namespace) -> Intent:
    """Return the intent that was given. Raises `ConfigError` for bounds that cannot be."""
    word = None if options.intent is None else cast(Objective, options.intent.replace("-", "_"))
    return Intent(word, options.latency, options.cost, options.quality_loss, options.tolerance or 0.0)


def losses_of(options: Namespace) -> dict[str, float]:
    """Return what forms lose, by their names. Raises `ConfigError` for what is no such list."""
    return numbers_of(options.losses, "--losses", "int4=0.03")


def numbers_of(text: str, option: str, example: str) -> dict[str, float]:
    """Return numbers by name, from NAME=X,... Raises `ConfigError` for anything else, and for a name that is twice."""
    numbers: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (each.strip() for each in part.rpartition("="))
        if name in numbers:
            raise ConfigError(f"{option} {text!r} has {name} twice; give one number for each")
        try:
            numbers[name] = float(value if name else "")
        except ValueError as error:
            raise ConfigError(f"{option} {part!r} is no NAME=X, such as {example}") from error
    return numbers


def names_of(text: str, option: str) -> tuple[str, ...]:
    """Return the names in a list. Raises `ConfigError` for an empty one, and for one that is there twice."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"{option} {text!r} has an empty name, or one twice; separate names by commas")
    return names


def _gib_seconds(text: str) -> float:
    try:
        return float(text.removesuffix("GiBs"))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number of GiB seconds, such as 40GiBs") from None
