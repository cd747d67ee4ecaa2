"""The options of `elastic estimate`."""

from __future__ import annotations

from argparse import ArgumentParser

from elastic.cli.inputs.intent_options import add_intent, add_losses, add_space


def add_estimate(command: ArgumentParser) -> None:
    """Add the model, the devices, the load, and the space of configurations."""
    command.add_argument("model", metavar="MODEL", help="model directory; config.json is enough without --profile")
    add_space(command)
    add_intent(command)
    add_losses(command)
    command.add_argument(
        "--profile", action="store_true", help="measure fingerprints of the model here; else rates of data sheets"
    )
    command.add_argument("--planned", action="store_true", help="also what this version cannot run")
    command.add_argument("--top", type=int, default=10, metavar="N", help="configurations to show (10)")
