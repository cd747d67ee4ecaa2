"""How fast the simulator is, beside what is published of others that simulate serving.

    python benchmarks/sim_speed.py [--quick]

Loads of the sizes that others were timed with: 300 requests of conversations, ten a second, to one instance
(LLMServingSim, its validation against vLLM), and 128 requests to four instances (Vidur, a log of its own). Both are
simulated with each step as an event, as others do, and with decode steps that are alike as one (`stretch_s`). Last,
1,000 instances (`day-1000`) for some seconds. Told are seconds of a processor in the median of rounds, and requests,
steps and events in one. Published seconds are of other machines, and by the clock: they tell a magnitude. What each
computes for a step is another thing, too: LLMServingSim walks the operators and the network of each, Vidur predicts
operators, and here a step has one cost.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

from common import SEED, arguments, finish, table

from elastic.sim.run import Run
from elastic.sim.scenario import Scenario, parse_scenario, read_scenario

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
LENGTHS = {
    "lengths": "lognormal",
    "prompt_median": 120,
    "prompt_sigma": 1.0,
    "answer_median": 500,
    "answer_sigma": 0.7,
    "most_tokens": 8000,
}
STRETCHES_S = (0.0, 0.5)
DAY_S = 20.0


@dataclass(frozen=True)
class Published:
    """How long another simulator takes."""

    simulator: str
    requests: int
    seconds: str
    """As they are told."""
    load: str
    source: str


PUBLISHED = (
    Published(
        "LLMServingSim",
        300,
        "9.6; 157 before",
        "one instance",
        "github.com/casys-kaist/LLMServingSim, pull request 67: Llama-3.1-8B on an RTX PRO 6000",
    ),
    Published(
        "LLMServingSim",
        300,
        "15.9; 391 before",
        "one instance",
        "the same: Llama-3.1-8B on an RTX 4090, whose KV cache is full",
    ),
    Published(
        "LLMServingSim",
        300,
        "36.6; 191 before",
        "one instance",
        "the same: Qwen3-32B shared by two RTX PRO 6000",
    ),
    Published(
        "Vidur",
        128,
        "about 2",
        "four instances",
        "github.com/microsoft/vidur, issue 41: times of its log, to the second, without what it trains before",
    ),
)


def load(requests: int, instances: int, stretch_s: float) -> Scenario:
    """Return a load of about so many requests, ten a second."""
    values: dict[str, Any] = {
        "title": f"{requests} requests to {instances}",
        "duration_s": requests / 10,
        "seed": SEED,
        "fleet": {"instances": instances},
        "engine": {"max_requests": 256, "max_batch_tokens": 2048},
        "model": {"device": "a6000", "most_tokens": 8000, "config": dict(LLAMA_8B)},
        "simulation": {"stretch_s": stretch_s},
        "requests": [{"arrivals": "poisson", "rate": 10, **LENGTHS}],
    }
    return parse_scenario(values)


def timed(scenario: Scenario, rounds: int) -> dict[str, Any]:
    """Play a scenario again and again; return the processor's seconds in the median, and what was done in them."""
    taken = []
    for _ in range(rounds):
        run = Run(scenario)
        began_s = time.process_time()
        speed = run.play()
        taken.append(time.process_time() - began_s)
    seconds, requests = statistics.median(taken), run.report.requests["completed"]
    assert requests == run.report.requests["arrived"], "requests are lost"
    return {
        "instances": scenario.instances,
        "requests": requests,
        "simulated_s": speed.simulated_s,
        "seconds": seconds,
        "requests_per_s": requests / seconds,
        "steps_per_s": speed.steps / seconds,
        "events_per_s": speed.events / seconds,
    }


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    rounds = 1 if options.quick else min(options.rounds, 5)
    results: dict[str, Any] = {}
    for requests, instances in ((30, 1),) if options.quick else ((300, 1), (128, 4)):
        for stretch_s in STRETCHES_S:
            steps = "steps together" if stretch_s else "each step an event"
            name = f"{requests} requests, {instances} x Llama 8B, {steps}"
            results[name] = timed(load(requests, instances, stretch_s), rounds)
    day = read_scenario("day-1000", seed=SEED)
    seconds = 1.0 if options.quick else DAY_S
    results[f"day-1000, its first {seconds:g} s"] = timed(replace(day, duration_s=seconds), 1)
    columns = ("requests", "simulated_s", "seconds", "requests_per_s", "steps_per_s", "events_per_s")
    table(
        ["here", *(column.replace("_per_s", "/s") for column in columns)],
        [[name, *(f"{row[column]:,.4g}" for column in columns)] for name, row in results.items()],
    )
    table(
        ["published", "requests", "seconds", "load", "source"],
        [[each.simulator, each.requests, each.seconds, each.load, each.source] for each in PUBLISHED],
    )
    finish("sim_speed", options.device, results)


if __name__ == "__main__":
    main()
