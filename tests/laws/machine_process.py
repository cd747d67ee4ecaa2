"""State machines that run in a process of their own: its arguments, its run, and how a test starts it."""

from __future__ import annotations

import argparse
import faulthandler
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from support.child_process import run_script


def run_machine(machine: Path, *arguments: str, timeout: float) -> None:
    """Run a machine's file to its end, and print what it printed."""
    print(run_script(machine, "--timeout", str(timeout), *arguments, timeout=timeout + 60))


def machine_parser(examples: int, steps: int, timeout: float) -> argparse.ArgumentParser:
    """What all machines understand, with these defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=examples)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--timeout", type=float, default=timeout)
    parser.add_argument("--random", action="store_true", help="other examples each time")
    return parser


def prepare_process(options: argparse.Namespace) -> None:
    """One thread computes; who hangs says where, and ends."""
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    torch.set_num_threads(1)


def run_examples(
    machine: type[RuleBasedStateMachine], options: argparse.Namespace, examples: int | None = None
) -> None:
    """Run a machine, without looking for a smaller example where one fails: they take minutes.

    `examples`: how many; None: as the options say.
    """
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=options.examples if examples is None else examples,
            stateful_step_count=options.steps,
            deadline=None,
            database=None,
            derandomize=not options.random,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
