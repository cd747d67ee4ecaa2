"""The command `elastic`: its options, and its exit codes."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from elastic import __version__
from elastic.assets import MODEL_DIR
from elastic.cli.fleet import add_options as add_fleet
from elastic.cli.inputs.bench_options import add_bench
from elastic.cli.inputs.intent_options import add_estimate, add_place
from elastic.cli.inputs.interrupts import INTERRUPTED, leaving_on_interrupt
from elastic.cli.inputs.model_loading import add_dtype
from elastic.cli.rank import add_options as add_rank
from elastic.cli.serve import add_options as add_serve
from elastic.cli.vllm_args import add_options as add_vllm_args
from elastic.errors import ConfigError, ElasticError

PREDICTIONS = ("estimate", "place", "plan", "simulate")
"""Commands in a room of their own."""
SERVING = ("rank", "serve")
"""Those that run without anybody who reads what they print."""
USER_ERROR, CLOSED_PIPE = 2, 128 + signal.SIGPIPE
UNWRITABLE = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC)
DEMO_PROMPT = 'def read_file(path):\n    """Read'


def parser() -> argparse.ArgumentParser:
    """Return the parser of all sub-commands."""
    root = argparse.ArgumentParser(prog="elastic", description="A language model that changes shape while it serves.")
    root.add_argument("--version", action="version", version=f"elastic {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="move memory under a running generation, and watch")
    _add_common(demo, prompt=DEMO_PROMPT, tokens=400)
    demo.add_argument("--pages", metavar="SIZE", help="page size on a CPU (4KiB for the small model inside)")
    generate = commands.add_parser("generate", help="generate text with a wrapped model")
    _add_common(generate, prompt=None, tokens=128)
    generate.add_argument("--prepack", action="store_true", help="matrices in the order that a CPU multiplies fastest")
    _add_profile(commands.add_parser("profile", help="find the order in which to swap the layers of a model"))
    add_serve(commands.add_parser("serve", help="serve a model over HTTP, as OpenAI's API does"))
    add_fleet(commands.add_parser("fleet", help="look at a fleet, move its requests, add and remove ranks"))
    add_rank(commands.add_parser("rank", help="serve a model for a fleet that is elsewhere"))
    add_vllm_args(commands.add_parser("vllm-args", help="the options that make `vllm serve` elastic"))
    add_bench(commands.add_parser("bench", help="replay a trace of requests, and compare what came of it"))
    top = commands.add_parser("top", help="watch a server")
    top.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="(%(default)s)")
    top.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (1)")
    top.add_argument("--once", action="store_true", help="print one frame; exit code 2 if there is no answer")
    _add_plan(commands.add_parser("plan", help="where to put layers and their replicas, and what that gains"))
    _add_simulate(commands.add_parser("simulate", help="run a fleet in simulated time"))
    add_estimate(commands.add_parser("estimate", help="what a model would need and do on devices, without loading it"))
    add_place(commands.add_parser("place", help="which model would go to which devices, and in which configuration"))
    return root


def _add_simulate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "scenario", nargs="?", metavar="SCENARIO", help="a TOML file, or the name of one inside; none: list these"
    )
    command.add_argument("--seed", type=int, metavar="N", help="another one than the scenario's")
    command.add_argument("--json", metavar="FILE", help="where to write all figures, the timeline too")
    command.add_argument("--plot", metavar="FILE", help="draw a picture, a PNG (needs matplotlib)")


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="model directory; config.json is enough without --measure; several lend each other the places",
    )
    command.add_argument("--places", required=True, metavar="PLACES", help="such as cpu#a=1GiB,cpu#b=2GiB")
    command.add_argument("--batch", type=int, default=8, metavar="N", help="sequences at once (8)")
    command.add_argument("--tokens", type=int, default=512, metavar="N", help="of each prompt (512)")
    command.add_argument("--new-tokens", type=int, default=128, metavar="N", help="generated for each (128)")
    command.add_argument(
        "--margin", type=float, default=0.1, metavar="X", help="share of each place to leave free (0.1)"
    )
    command.add_argument(
        "--measure", action="store_true", help="measure a layer and copies here; else speeds are assumed"
    )


def _add_common(command: argparse.ArgumentParser, *, prompt: str | None, tokens: int) -> None:
    command.add_argument(
        "--model", default=str(MODEL_DIR), metavar="PATH", help="model directory (default: the small one inside)"
    )
    add_dtype(command)
    command.add_argument("--prompt", default=prompt, required=prompt is None, metavar="TEXT")
    command.add_argument("--max-new-tokens", type=int, default=tokens, metavar="N")
    command.add_argument("--place", metavar="PLACE", help="memory to use, such as cpu=64MiB or cuda:0=20GiB")
    command.add_argument("--seed", type=int, default=0)


def _add_profile(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="model directory")
    add_dtype(command)
    command.add_argument(
        "--calibration", required=True, nargs="+", metavar="FILE", help="text like what will be served"
    )
    command.add_argument("--variant", default="int4", metavar="NAME", help="such as int4 (the default), int8 or 2:4")
    for name, default, score in (("alpha1", 0.25, "LTS"), ("alpha2", 0.25, "LRS"), ("beta", 0.5, "MDS")):
        command.add_argument(f"--{name}", type=float, default=default, metavar="X", help=f"weight of {score}")
    command.add_argument("--tokens", type=int, default=2048, metavar="N", help="of the calibration text (2048)")
    command.add_argument("--batch", type=int, default=1, metavar="N", help="sequences run at once (1)")
    command.add_argument("--lazy", action="store_true", help="the same order sooner, without the scores of also-rans")
    command.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu (the default) or cuda:0")
    command.add_argument("--out", metavar="FILE", help="where the profile goes (MODEL/elastic-profile-VARIANT.json)")
    command.add_argument("--plot", metavar="FILE", help="draw scores, and loss by layers swapped, as PNG")
    command.add_argument("--held-out", metavar="FILE", help="text for the losses of the plot")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, or 2 after one line that says what the caller must change.

    An interrupt and a closed pipe at standard output (`| head`) end a command in silence, with the codes of shells.
    """
    command = "elastic"
    try:
        options = parser().parse_args(arguments)
        command = f"elastic {options.command}"
        _prepare_output(options.command)
        code = _command(options.command)(options)
        sys.stdout.flush()
    except ElasticError as error:
        return _refused(command, error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return CLOSED_PIPE
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _drop_output()
        return _refused(command, f"what it writes has nowhere to go: {error.strerror}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        return _refused(command, f"{error}; tables and live views need: pip install 'elastic-llm[cli]'")
    return code


def _prepare_output(command: str) -> None:
    """Have characters that standard output cannot encode be `?`. Raises `ConfigError` where it is closed.

    What serves prints nothing that it could not do without.
    """
    if sys.stdout is None:
        if command not in SERVING:
            raise ConfigError("standard output is closed; give it a file, or /dev/null")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # where it is no longer the file that it was opened as
            sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """Write nothing more: Python flushes once again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(command: str, why: object) -> int:
    print(f"{command}: {why}", file=sys.stderr)
    return USER_ERROR


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """Import and return the function behind a command."""
    name = name.replace("-", "_")
    with leaving_on_interrupt():
        module = importlib.import_module(f"elastic.cli.{'predictions.' if name in PREDICTIONS else ''}{name}")
    command: Callable[[argparse.Namespace], int] = getattr(module, name)
    return command


if __name__ == "__main__":
    sys.exit(main())
