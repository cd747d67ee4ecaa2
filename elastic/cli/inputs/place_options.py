"""The options of `elastic place`."""

from __future__ import annotations

from argparse import ArgumentParser

from elastic.cli.inputs.intent_options import add_intent, add_losses, add_space
from elastic.planning.deployment.policies import POLICIES, THETA


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
    command.add_argument("--planned", action="store_true", help="also what this version cannot run")
    command.add_argument("--json", action="store_true", help="print one JSON document")
