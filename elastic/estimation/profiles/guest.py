"""The guest: a process that measures fingerprints of a model beside what is served there. (iServe, sections 4.2, 8.6)

It has the lowest priority, and computes for a share of its time only: behind each batch it sleeps. What it measured is
one line of JSON on its output. It ends with whoever started it; who wants it to end kills it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from elastic.errors import ConfigError, ElasticError, StateError
from elastic.estimation.model_layout import layout_of
from elastic.estimation.profile import CostProfile, fingerprint_bytes, measure_fingerprints
from elastic.estimation.profiles.spare_time import end_with_parent, rest_behind
from elastic.estimation.profiles.store import from_json, to_json
from elastic.planning.estimate.configuration import FULL

SHARE = 0.2
"""Of its time that it computes."""
STEP_TOKENS = 256
"""New tokens of a batch that it measures, at the most: a long one would have others wait."""


class GuestProcess:
    """A module that runs as a process of the lowest priority and measures; `ended` looks whether it has."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        # not a pipe, which holds 64 KiB until someone reads
        self._output = os.fdopen(os.memfd_create("elastic-guest"), "w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.DEVNULL,
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)  # its imports take seconds of a core, too
        self._cancelled = False

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def result(self) -> CostProfile:
        """Return what it measured, when it has ended.

        Raises `ConfigError` with its reason, if it measured nothing, and `StateError` where it was cancelled or killed.
        """
        self._process.wait()
        try:
            with self._output as output:
                output.seek(0)
                content = json.loads(output.read().splitlines()[-1])
        except (ValueError, IndexError):  # also where `cancel` has closed it meanwhile
            if self._cancelled:
                raise StateError("the guest that measures was cancelled") from None
            if self._process.returncode < 0:
                raise StateError(f"the guest that measures was killed by signal {-self._process.returncode}") from None
            raise ConfigError(f"the guest that measures ended with code {self._process.returncode}") from None
        if "error" in content:
            raise ConfigError(str(content["error"]))
        return from_json(content)

    def cancel(self) -> None:
        """End it at once; its memory is free then."""
        self._cancelled = True
        self._process.kill()
        self._process.wait()
        self._output.close()


class ProfilingProcess(GuestProcess):
    """A guest that measures fingerprints of a model."""

    def __init__(self, model: str | Path, forms: Sequence[str], device: str, *, context: int, share: float) -> None:
        arguments = [str(model), *forms, "--device", device, "--context", str(context), "--share", str(share)]
        super().__init__("elastic.estimation.profiles.guest", arguments)


def guest_bytes(model: str | Path, forms: Sequence[str], context: int) -> int:
    """Return the memory that the largest fingerprint takes in the engine. Raises `ConfigError`."""
    layout = layout_of(model, torch.float32)
    tokens = context + STEP_TOKENS
    return max(fingerprint_bytes(layout, kind, name, tokens) for kind in layout.kinds for name in forms)


def run_guest(measure: Callable[[], CostProfile]) -> int:
    """Be a guest: measure, and print the profile, or why there is none."""
    end_with_parent()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    try:
        answer = to_json(measure())
    except ElasticError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
    return 0


def _main() -> int:
    parser = argparse.ArgumentParser(description="measure fingerprints beside what is served")
    parser.add_argument("model")
    parser.add_argument("forms", nargs="*", default=[FULL])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--share", type=float, default=SHARE)
    options = parser.parse_args()
    return run_guest(
        lambda: measure_fingerprints(
            options.model,
            options.forms,
            device=options.device,
            context=options.context,
            step_tokens=STEP_TOKENS,
            pace=partial(rest_behind, options.share),
        )
    )


if __name__ == "__main__":
    sys.exit(_main())
