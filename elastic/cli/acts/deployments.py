"""`elastic fleet deploy`, `intend`, `resize` and `undeploy`: models beside a server's own, and what they may have."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from elastic.cli.inputs.intent_options import add_intent, add_load, intent_of, names_of, said_load
from elastic.cli.views.sizes import mib
from elastic.cli.views.status_client import Send
from elastic.planning.estimate.intent import Intent

DEPLOY_S = 1800.0
"""How long the server may take: ranks load a model, and pack its variants."""


def add_deploying(what: Any) -> tuple[ArgumentParser, ...]:
    """Add the sub-commands, whose options `complete_deploying` adds behind those of all."""
    return (
        what.add_parser("deploy", help="serve one more model, in the configuration that is best for an intent"),
        what.add_parser("intend", help="want something else of a deployed model"),
        what.add_parser("undeploy", help="end a deployed model"),
        what.add_parser("resize", help="let deployed models have more or less of a device"),
    )


def complete_deploying(
    deploy: ArgumentParser, intend: ArgumentParser, undeploy: ArgumentParser, resize: ArgumentParser
) -> None:
    """Add the options of the sub-commands."""
    deploy.add_argument("path", metavar="PATH", help="the model's directory, as the server finds it")
    deploy.add_argument("--name", metavar="NAME", help="under which requests ask for it (its directory's)")
    deploy.add_argument("--weights", metavar="NAMES", help="forms that it may have, as full,int8 (the server's)")
    for each in (intend, undeploy):
        each.add_argument("name", metavar="NAME", help="of the deployed model")
    many = "instances that share its requests, or 1-4: that follow the load"
    deploy.add_argument("--replicas", default="1", metavar="N", help=f"{many} (1)")
    intend.add_argument("--replicas", metavar="N", help=f"{many} (as before)")
    for each in (deploy, intend):
        add_intent(each)
    add_load(deploy)
    add_load(intend, as_before=True)
    intend.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    resize.add_argument("device", metavar="DEVICE", help="by its name, such as cuda:0")
    resize.add_argument("memory", metavar="SIZE", help="what all models together may have there, such as 40GiB")
    undeploy.add_argument("--now", action="store_true", help="do not wait until its requests have ended")


def _deploy(send: Send, options: Namespace) -> int:
    body = {
        "path": options.path,
        "name": options.name,
        "intent": _intent(options),
        "load": said_load(options) or None,
        "weights": names_of(options.weights, "--weights") if options.weights is not None else None,
        "replicas": options.replicas,
    }
    told = send("deploy", body, DEPLOY_S)
    print(f"{told.get('name')} serves as {told.get('configuration')}")
    for stage in told.get("stages") or []:
        first, last = stage["layers"]
        print(f"  layers {first}-{last} on {', '.join(stage['devices'])}: {mib(stage['nbytes'])} of each")
    return 0


def _intend(send: Send, options: Namespace) -> int:
    body = {
        "name": options.name,
        "intent": None if intent_of(options) == Intent() else _intent(options),  # none was said: it stays
        "load": said_load(options) or None,
        "replicas": options.replicas,
        "dry_run": options.dry_run,
    }
    told = send("intend", body, DEPLOY_S)
    for step in told.get("steps") or []:
        to = f" to {step['weights']}" if step.get("weights") else ""
        print(f"  {step['kind']} {', '.join(step['devices'])}{to}: {step.get('moved_bytes', 0):,} bytes of weights")
    did = "would take about" if options.dry_run else "took"
    print(
        f"{told.get('status')}: {told.get('before')} to {told.get('after')}; it {did} {told.get('seconds', 0.0):.1f} s"
    )
    if told.get("status") == "partial":
        print(f"stopped: {told.get('why')}")
    return 1 if told.get("status") == "partial" else 0


def _undeploy(send: Send, options: Namespace) -> int:
    send("undeploy", {"name": options.name, "drain": not options.now}, DEPLOY_S)
    print(f"{options.name} has ended")
    return 0


def _resize(send: Send, options: Namespace) -> int:
    body = {"device": options.device, "memory": options.memory}
    for told in send("resize", body, DEPLOY_S):
        if told["name"] == options.device:
            print(f"{options.device} has {mib(told['memory_bytes'])} for models, {mib(told['free_bytes'])} free")
    return 0


def _intent(options: Namespace) -> dict[str, Any]:
    intent = intent_of(options)
    return {name: value for name, value in vars(intent).items() if value is not None}


DEPLOYING = {"deploy": _deploy, "intend": _intend, "undeploy": _undeploy, "resize": _resize}
