"""`elastic vllm-args`: the options that make `vllm serve` elastic, as text for a shell."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import Any

from elastic.config import SLO
from elastic.errors import ConfigError


def add_options(command: ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument("--budget", required=True, metavar="SIZE", help="of weights and KV cache of a rank, as 30GiB")
    command.add_argument("--policy", default="manual", metavar="NAME", help="accuracy, balanced, performance (manual)")
    command.add_argument("--variants", nargs="+", default=[], metavar="NAME", help="what layers can be in, as int4")
    command.add_argument("--order", default="front_to_back", metavar="ORDER", help="which layers to swap first")
    command.add_argument("--slo-ttft", type=float, metavar="S", help="time to the first token that is to be kept")
    command.add_argument("--slo-tpot", type=float, metavar="S", help="time per further token that is to be kept")
    command.add_argument("--variant-cache", metavar="PATH", help="directory that keeps packed layers")
    command.add_argument("--copy-rate", metavar="SIZE", help="bytes a second that move while the model computes")
    command.add_argument("--page-bytes", metavar="SIZE", help="of a page; on a CPU 2MiB for large models")
    command.add_argument("--no-promise", action="store_true", help="admit as vLLM does, and preempt as it does")
    command.add_argument("--no-moves", action="store_true", help="leave blocks of live requests where they are")
    command.add_argument("--connector", metavar="JSON", help="a KV connector of yours, as in --kv-transfer-config")


def vllm_args(options: Namespace) -> int:
    """Print the arguments on one line, for `vllm serve MODEL $(elastic vllm-args …)`; returns the exit code."""
    import elastic.vllm

    slo = SLO(ttft_s=options.slo_ttft, tpot_s=options.slo_tpot)
    made = elastic.vllm.options(
        options.budget,
        policy=options.policy,
        variants=options.variants,
        order=options.order,
        slo=None if slo == SLO() else slo,
        variant_cache=options.variant_cache,
        copy_rate=options.copy_rate,
        page_bytes=options.page_bytes,
        promise=not options.no_promise,
        move_blocks=not options.no_moves,
        connector=_connector(options.connector),
    )
    print(" ".join(to_arguments(made)))
    return 0


def to_arguments(made: dict[str, Any]) -> list[str]:
    """Return keyword arguments of vLLM's engine as options of its command.

    A shell splits what a command prints at spaces, and takes no quotes out. Raises `ConfigError` for a value with any.
    """
    arguments = []
    for name, value in made.items():
        text = json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)
        if text.split() != [text]:
            raise ConfigError(f"{name}={text!r} has spaces, at which a shell would split it; give paths without any")
        arguments += [f"--{name.replace('_', '-')}", text]
    return arguments


def _connector(text: str | None) -> dict[str, Any] | None:
    try:
        connector = json.loads(text) if text is not None else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--connector={text!r} is no JSON: {error}") from error
    if connector is not None and not (isinstance(connector, dict) and "kv_connector" in connector):
        raise ConfigError(f"--connector={text!r} must be an object with a field kv_connector")
    return connector
