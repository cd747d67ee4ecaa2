"""The options of `elastic estimate`."""

from __future__ import annotations

from argparse import ArgumentParser

OBJECTIVES = ("latency", "cost", "memory", "gpu-hours")


def add_estimate(command: ArgumentParser) -> None:
    """Add the model, the devices, the load, and the space of configurations."""
    command.add_argument("model", metavar="MODEL", help="model directory; config.json is enough without --profile")
    command.add_argument(
        "--devices",
        required=True,
        metavar="DEVICES",
        help="such as 8*h100, 2*a6000=40GiB, cuda:0=80GiB,cuda:1=80GiB or cpu#a=1GiB",
    )
    command.add_argument("--kind", default=None, metavar="NAME", help="the data sheet of cuda:N, such as a100-80gb")
    command.add_argument(
        "--rate", type=float, default=0.0, metavar="X", help="requests a second (0: one request at a time)"
    )
    command.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of each prompt (512)")
    command.add_argument("--new-tokens", type=int, default=128, metavar="N", help="generated for each (128)")
    command.add_argument(
        "--weights",
        default=None,
        metavar="NAMES",
        help="full, or names of variants, pruned ones too (full,int8,int4,2:4)",
    )
    command.add_argument("--kv", default="full", metavar="NAMES", help="full, int8 (full)")
    command.add_argument("--intent", choices=OBJECTIVES, default="cost", help="what is to be small (cost)")
    command.add_argument(
        "--profile", action="store_true", help="measure fingerprints of the model here; else rates of data sheets"
    )
    command.add_argument("--planned", action="store_true", help="also what this version cannot run")
    command.add_argument("--top", type=int, default=10, metavar="N", help="configurations to show (10)")
