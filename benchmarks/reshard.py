"""Ranks that share every layer when a request is too long for each: what it gives and what it costs.

    python benchmarks/reshard.py [--only NAME …] [--rounds 5] [--keep FILE]

On two cores, with the Llama of 40M parameters of `serving.py`, its layers cut in four: ranks in 246 MiB, each a process
pinned to one of the cores, except for `kv` (no model, and nothing of the library) and `weights` and `pages` (two models
in this process, pinned to no core). All rows together are meant to take ten minutes on cores that do nothing else.

    python benchmarks/reshard.py --device cuda:0

On GPUs, all that there are or one, with twelve layers of Llama-3-8B; without `schedulers`, of which a GPU says nothing,
and without `order` and `hybrid`, whose long requests would be longer than what the model was made for. What ranks read
of each other goes through page-locked memory and sockets there, in one process, too.

Targets were fixed before figures were taken; rows:

- `kv`: of memory as large as a cache of 90 % use, what leaves and what stays: local part over the paper's base form at
  most .4; all of it over the way through host memory, there and back
- `weights`: shards that leave and return, per layer: up at most .2 of the paper's base (partial swap), both at most .3
  of the way through host memory (here memcpy against memcpy)
- `pages`: what ranks own besides while layers change, over what the paper's base form needs: at one layer a pause at
  most .09
- `context`: the longest request at degree 1, 2 and 4, which is served: at 2 more than twice that at 1, and .99 of what
  budgets leave room for
- `steps`: running answers while so many layers change their rank at each pause, and while instances stop for all of
  them: gaps over those at rest, the cores that the ranks use beside it, and by how much the longest pause is shorter
  than the stop for all (of CUDA at least .8). `through host`: they stop, and all that a rank is to have goes through
  host memory (Seesaw): the whole change over that at most .05, .3 of a CPU
- `schedulers`: eight simulated ranks and the paper's arrivals: tokens a second over round robin and least load first at
  least 1.25
- `order`: the same schedulers on two real ranks: the order is to be that of the simulated ones
- `hybrid`: short requests, and long ones that fit no rank: by the policy of lengths, by layers dropped in time, and
  with ranks that always are a pipeline, by themselves, or share layers: tokens a second in time at least 1.5 of `drop`,
  and all long ones served; TTFT, TPOT and the P99 of gaps of the short ones
- `rates`: the same with a quarter, three quarters and all of the short requests that two ranks serve; it takes three
  times as long, and is taken only by name
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import KEEP, Kept, arguments, finish, table
from reshard_fleets import context, hybrid, rates, steps
from reshard_local import kv, weights
from reshard_pages import pages
from reshard_real import order
from reshard_schedulers import schedulers
from reshard_setting import Setting
from serving import flat

ROWS = {row.__name__: row for row in (kv, weights, pages, context, steps, schedulers, order, hybrid, rates)}
ON_A_CPU = ("schedulers", "order", "hybrid", "rates")
BY_NAME = ("rates",)


def main() -> None:
    more = {"only": {"nargs": "*", "choices": list(ROWS), "help": "rows to take"}, "keep": KEEP}
    options = arguments(__doc__.splitlines()[0], **more)
    rows = [name for name in ROWS if options.device == "cpu" or name not in ON_A_CPU]
    if wrong := sorted(set(options.only or ()).difference(rows)):
        sys.exit(f"--only {' '.join(wrong)}: rows of a CPU alone; on {options.device} there are {', '.join(rows)}")
    rounds = 1 if options.quick else min(options.rounds, 5)
    results: dict[str, Any] = {}
    kept = Kept(options.keep)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting.make(Path(folder), options.device, quick=options.quick)
        for name in options.only or [row for row in rows if row not in BY_NAME]:
            begin = time.perf_counter()
            results[name] = ROWS[name](setting, rounds, options.quick, kept)
            table([f"{name} ({time.perf_counter() - begin:.0f} s)", ""], list(flat(results[name])))
            print(flush=True)
    finish("reshard", options.device, results)


if __name__ == "__main__":
    main()
