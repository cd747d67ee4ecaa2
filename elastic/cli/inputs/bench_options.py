"""The options of `elastic bench`, and the trace that they describe."""

from __future__ import annotations

import math
import os
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from elastic.cli.inputs.checks import refuse
from elastic.cli.inputs.model_loading import add_dtype
from elastic.errors import ConfigError

if TYPE_CHECKING:
    from elastic.bench.traces.generator import ArrivalProcess, LengthDistribution
    from elastic.bench.traces.trace import Trace

DURATION_S = 60.0
LENGTHS = "256:32"
POLICIES = "manual (the default: nothing is swapped), accuracy, balanced, performance"


def add_bench(command: ArgumentParser) -> None:
    """Add the sub-commands `run` and `compare`."""
    modes = command.add_subparsers(dest="mode", required=True, metavar="MODE")
    run = modes.add_parser("run", help="replay a trace against a model or a server, and measure")
    _add_target(run)
    _add_trace(run)
    _add_prompts(run)
    _add_measuring(run)
    compare = modes.add_parser("compare", help="result files side by side, with ratios to the first")
    compare.add_argument("files", nargs="+", metavar="FILE", help="what `elastic bench run --out` wrote")
    compare.add_argument("--plot", metavar="FILE", help="draw them, as PNG (needs --save-detailed)")


def check_pairs(options: Namespace) -> None:
    """Raise `ConfigError` for options that mean nothing beside the others that were given."""
    served_here = ("place", "dtype", "policy", "variants", "prepack", "max_queue")
    pairs = (
        (options.url is not None, served_here, "is of a model that is served here; give --model in place of --url"),
        (options.model is not None, ("served_model_name",), "is of a server; give --url in place of --model"),
        (options.prompts is None, ("tokenizer",), "cuts prompts from a text; give --prompts FILE"),
        (options.prompts is not None, ("vocabulary",), "is of random tokens; leave --prompts out"),
        (options.trace is not None, ("duration", "lengths"), "is of generated requests; cut a --trace by --window A:B"),
        (options.out is None, ("save_detailed",), "is of the file of the result; give --out FILE"),
    )
    for unused, names, words in pairs:
        if unused:
            refuse(options, names, words)


def make_trace(options: Namespace, most_tokens: int | None) -> Trace:
    """Read or generate the requests to offer, cut and scaled. `most_tokens`: the size of the model's context."""
    trace = _generate(options) if options.trace is None else _read(options)
    if options.rate_scale != 1 or options.rate_method == "stretch":
        trace = trace.with_rate(options.rate_scale, options.rate_method, seed=options.seed)
    most = most_tokens if options.most_tokens is None else options.most_tokens
    return trace.with_tokens(options.token_scale, most=most)


def numbers(text: str, option: str, names: str) -> list[float]:
    """Read the numbers of `A:B:...`. Raises `ConfigError` naming the option and its parts."""
    try:
        values = [float(part) for part in text.split(":")]
    except ValueError:
        values = []
    if len(values) != len(names.split(":")) or not all(map(math.isfinite, values)):
        raise ConfigError(f"{option} {text}: {names} is needed, in numbers")
    return values


def _add_target(run: ArgumentParser) -> None:
    target = run.add_mutually_exclusive_group(required=True)
    target.add_argument("--model", metavar="PATH", help="model directory, served in this process")
    target.add_argument("--url", metavar="URL", help="a server with /v1/completions")
    run.add_argument("--served-model-name", metavar="NAME", help="with --url (its first model)")
    run.add_argument("--place", metavar="PLACE", help="with --model: memory to use, such as cuda:0=20GiB")
    run.add_argument("--policy", metavar="POLICY", help=f"with --model: {POLICIES}, or a file")
    run.add_argument("--variants", default="", metavar="NAMES", help="with --model: what to swap to, such as int8,2:4")
    add_dtype(run)
    run.add_argument("--prepack", action="store_true", help="with --model: matrices in a CPU's fastest order")
    run.add_argument("--max-queue", type=int, metavar="N", help="with --model: refuse more that wait")


def _add_trace(run: ArgumentParser) -> None:
    source = run.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="Azure 2023 CSV, BurstGPT CSV, Mooncake JSONL")
    source.add_argument("--poisson", metavar="RATE", help="requests per second")
    source.add_argument("--gamma", metavar="RATE:BURSTINESS", help="burstiness below 1: burstier")
    source.add_argument("--on-off", metavar="ON:OFF:ON_S:OFF_S", help="two rates, and how long each lasts")
    source.add_argument("--ramp", metavar="FIRST:LAST", help="from one rate to another over --duration")
    run.add_argument("--duration", type=float, metavar="S", help=f"of generated arrivals ({DURATION_S:g})")
    run.add_argument(
        "--lengths",
        metavar="LENGTHS",
        help="of generated requests: PROMPT:OUTPUT tokens; MEDIAN:SIGMA:MEDIAN:SIGMA, lognormal prompts and outputs; "
        "or a trace file to draw them from (256:32)",
    )
    run.add_argument("--window", metavar="A:B", help="of --trace: from second A to before second B")
    run.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="times as many requests a second")
    run.add_argument(
        "--rate-method",
        default="thin",
        choices=("thin", "upscale", "stretch"),
        help="leave requests out, add copies in the gaps between them, or change the pace",
    )
    run.add_argument("--token-scale", type=float, default=1.0, metavar="X", help="times as many tokens")
    run.add_argument("--most-tokens", type=int, metavar="N", help="prompt and output together (the model's context)")
    run.add_argument("--seed", type=int, default=0, help="of all that is drawn")


def _add_prompts(run: ArgumentParser) -> None:
    run.add_argument("--prompts", metavar="FILE", help="text to cut prompts from (random tokens)")
    run.add_argument("--tokenizer", metavar="PATH", help="for --prompts with --url")
    run.add_argument("--vocabulary", type=int, metavar="N", help="of random tokens (model's; --url: 1000)")
    run.add_argument("--shared-prefix", type=int, default=0, metavar="N", help="tokens that all prompts begin with (0)")


def _add_measuring(run: ArgumentParser) -> None:
    run.add_argument("--slo-ttft", type=float, metavar="S", help="bound on TTFT in seconds")
    run.add_argument("--slo-tpot", type=float, metavar="S", help="bound on TPOT in seconds")
    run.add_argument("--slo-e2el", type=float, metavar="S", help="bound on arrival to last token")
    run.add_argument("--warmup", type=int, default=1, metavar="N", help="requests before the run (1)")
    run.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a request, from its arrival (600)")
    run.add_argument("--out", metavar="FILE", help="the result, JSON with the keys of `vllm bench serve`")
    run.add_argument("--records", metavar="FILE", help="each request, a line of JSON")
    run.add_argument(
        "--save-detailed", action="store_true", help="with --out: arrays too, which `compare --plot` needs"
    )


def _read(options: Namespace) -> Trace:
    from elastic.bench.traces.readers import read_trace

    trace = read_trace(options.trace, seed=options.seed)
    if options.window is None:
        return trace
    return trace.cut(*numbers(options.window, "--window", "A:B"))


def _generate(options: Namespace) -> Trace:
    from elastic.bench.traces.generator import generate

    if options.window is not None:
        raise ConfigError("--window is of a --trace; generated arrivals have --duration")
    duration_s = DURATION_S if options.duration is None else options.duration
    return generate(_arrivals(options, duration_s), _lengths(options.lengths or LENGTHS), duration_s, seed=options.seed)


def _arrivals(options: Namespace, duration_s: float) -> ArrivalProcess:
    from elastic.bench.traces.generator import Gamma, OnOff, Poisson, Ramp

    if options.poisson is not None:
        return Poisson(*numbers(options.poisson, "--poisson", "RATE"))
    if options.gamma is not None:
        return Gamma(*numbers(options.gamma, "--gamma", "RATE:BURSTINESS"))
    if options.on_off is not None:
        return OnOff(*numbers(options.on_off, "--on-off", "ON:OFF:ON_S:OFF_S"))
    first, last = numbers(options.ramp, "--ramp", "FIRST:LAST")
    return Ramp(first, last, duration_s)


def _lengths(lengths: str) -> LengthDistribution:
    from elastic.bench.traces.generator import Fixed, LikeTrace, Lognormal
    from elastic.bench.traces.readers import read_trace

    if os.path.isfile(lengths):
        return LikeTrace(read_trace(lengths))
    if lengths.count(":") == 3:
        return Lognormal(*numbers(lengths, "--lengths", "MEDIAN:SIGMA:MEDIAN:SIGMA"))
    prompt, output = numbers(lengths, "--lengths", "PROMPT:OUTPUT")
    if not (prompt.is_integer() and output.is_integer()):
        raise ConfigError(f"--lengths {lengths}: tokens are whole numbers")
    return Fixed(int(prompt), int(output))
