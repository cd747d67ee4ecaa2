"""The process of the guest. Its own children do not import it: that is so for a `__main__` of a package alone."""

from __future__ import annotations

import argparse
import sys

from elastic.cluster.fleet.profiling.guest import measure_two_ranks
from elastic.cluster.fleet.profiling.handovers import HANDOVER_ROUNDS
from elastic.cluster.peers.link_profile import REPEATS, ROUNDS
from elastic.estimation.profiles.guest import SHARE, run_guest


def _main() -> int:
    parser = argparse.ArgumentParser(description="measure links beside what is served")
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--handover-rounds", type=int, default=HANDOVER_ROUNDS)
    options = parser.parse_args()
    counts = options.repeats, options.rounds, options.handover_rounds
    return run_guest(lambda: measure_two_ranks(*counts, options.share))


if __name__ == "__main__":
    sys.exit(_main())
