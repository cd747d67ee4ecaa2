"""Two instances that drop layers which they hold twice: what it gives, what it costs, and when one of them is killed.

    python benchmarks/drop.py [--only NAME …] [--rounds 5] [--keep FILE]

Each round starts fresh processes; works of one row are shuffled within a round. Two ranks, pinned to a core each, serve
the Llama of 40M parameters of `serving.py`. Targets, fixed before the figures were taken:

- `capacity`: half of each dropped: tokens that both instances can hold, over what budgets leave beside the weights that
  remain and what is fixed, in bytes per token: at least .98. Beside it the same over what is left without the pages of
  one layer that each rank keeps back to stream released layers
- `pause`: P99 of the pause of one flip under load, beyond the step that is in flight: at most 1 ms. Whole drop without
  an exchange of all layers of the model inside, with digests known: at most 5 ms; beside it munmap of as many bytes
- `exchange`: one instance drops half of its layers, which the other computes for it then; again and again, under load.
  Stall of a request that moves, its longest gap during a drop less its usual one: at most .1 of the whole exchange. P99
  gap of the other's requests during exchanges, over that at rest: at most 1.15; without coordination 1.5 times more.
  Gaps are those until the copies are done: then steps go through both ranks, and take longer whatever the form. Also
  the form of the paper, where the instance stands still for all of it, and TTFT of requests that come meanwhile: one at
  each instance, in every other drop, and as many at rest.
  Beside the seconds of a drop and of a restore are those that their dry runs predict
- `prices`: seconds of serving that the fleet says a drop, a restore and a move would cost, and what they did: by tokens
  that were not generated meanwhile, and longer or shorter steps afterwards, for as long as prices count these
- `restoration`: two waves and a calm, as those of `overload.py`, restoring and not restoring: P50 of TTFT and TPOT in
  the calm .2 better; P99 of TTFT in the second wave beside it
- `extreme`: twice as many requests as `wait` serves, until one waits for its first token five times as long as usual:
  how much longer `drop` lasts than `wait`, over how much more KV cache it has: at least .9
- `kill`: SIGKILL, and SIGSTOP, for one of two ranks in a group under load: next tokens within 3 s, nothing lost,
  nothing wrong, no more tokens computed again than live requests had
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bursts import Arrival, Rates, drawn, drawn_in
from common import KEEP, SEED, Kept, arguments, finish, percentiles, ratio, table
from drop_alone import dropped_alone
from overload import BLOCK_TOKENS, ENGINE, LAYERS, OVERLOAD, PLACE, play, rates_kept
from serving import SIGNALS, Answer, Load, flat, fleet, in_process, prompt, save_model, served, summary, warm_up

import elastic
from elastic.assets import MODEL_DIR
from elastic.cluster.fleet.groups import exchange as exchanges
from elastic.cluster.fleet.groups import flip as layer_flips
from elastic.cluster.fleet.groups.results import Dropped
from elastic.controller.policies.arbiter import HORIZON_S
from elastic.engines.base import Request

HALF, OTHER_HALF = range(LAYERS // 2, LAYERS), range(LAYERS // 2)
CORES = [(0,), (1,)]
TOKEN_BYTES = LAYERS * 2 * 8 * 64 * 4
"""Keys and values of 8 heads of 64 in float32."""
WAVE, WAVE_RATE, WAVES_APART = 1.7, 2.0, 2.5
"""Requests of a wave, of those that there is room for; how many come a second, of the most that `wait` serves; the calm
between waves, in times that a request lasts."""
FORMS: dict[str, dict[str, Any]] = {
    "live": {},
    "live, not coordinated": {"coordinated": False},
    "stall": {"exchange": "stall"},
}
NEVER = {"dwell_s": 1e6, "idle_s": 1e6}
OVERRATE, PATIENCE, MOST_S = 2.0, 5.0, 60.0


def names(engine: elastic.Fleet) -> tuple[str, str]:
    first, second = (instance.name for instance in engine.status().instances)
    return first, second


def drop_half(engine: elastic.Fleet) -> Dropped:
    first, second = names(engine)
    dropped = engine.drop(layers={first: HALF, second: OTHER_HALF})
    if dropped.status != "applied":
        raise RuntimeError(f"the drop was {dropped.status}: {dropped.why}")
    return dropped


def tokens_held(engine: elastic.Fleet) -> int:
    """Return how many tokens the instances say that they could hold, once they have said it."""
    time.sleep(1.0)  # four beats
    return BLOCK_TOKENS * sum(instance.load.total_blocks for instance in engine.status().instances)


def books(engine: elastic.Fleet) -> dict[str, int]:
    """Add up what the ranks' budgets are used for."""
    total = {"budget": 0, "layers": 0, "fixed": 0, "staging": 0}
    for rank in engine.status().ranks:
        (place,) = engine.look(rank.name).status.places
        total["budget"] += place.budget_bytes
        for owner, nbytes in place.owners.items():
            name = "layers" if owner.startswith("layer:") else owner.split(":")[0]
            if name in total:
                total[name] += nbytes
    return total


def capacity(path: Path, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    before, after, left_tokens, less_staging, shares = [], [], [], [], {}
    for _ in range(rounds):
        with fleet(path, CORES, place=PLACE, engine=ENGINE) as engine:
            before.append(tokens_held(engine))
            drop_half(engine)
            after.append(tokens_held(engine))
            shares = books(engine)
            left = shares["budget"] - shares["layers"] - shares["fixed"]
            left_tokens.append(left / TOKEN_BYTES)
            less_staging.append((left - shares["staging"]) / TOKEN_BYTES)
    return {
        "tokens_before": statistics.median(before),
        "tokens_after": statistics.median(after),
        "of_what_budgets_leave": ratio(after, left_tokens),
        "of_that_less_staging": ratio(after, less_staging),
        "more": ratio(after, before),
        "bytes_after": shares,
    }


@contextmanager
def copies_noted() -> Iterator[list[float]]:
    """Give the time at which each exchange of fleets in this process had copied keys and values."""
    ends: list[float] = []
    copy = layer_flips._copy

    def noted(*args: Any) -> Any:
        done = copy(*args)
        ends.append(time.perf_counter())
        return done

    with patch.object(layer_flips, "_copy", noted):
        yield ends


@contextmanager
def flips_noted() -> Iterator[list[float]]:
    """Give the milliseconds that each flip of fleets in this process paused its instance."""
    found: list[float] = []
    flip = exchanges.flip_layers

    def noted(*args: Any, **options: Any) -> Any:
        done = flip(*args, **options)
        found.append(done.stalled_ms)
        return done

    with patch.object(exchanges, "flip_layers", noted):
        yield found


def pause(path: Path, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    flips: list[float] = []
    for _ in range(rounds):
        with flips_noted() as found, fleet(path, CORES, engine=ENGINE) as engine:
            warm_up(engine)
            load, choose = Load(engine), random.Random(SEED)
            for _ in range(4 if quick else 8):
                load.submit(Request(prompt(200, choose), 60 if quick else 300, ignore_eos=True))
            for _ in range(1 if quick else 4):
                drop_half(engine)
                engine.restore()
            load.wait()
        flips += found
    alone = {"model inside": MODEL_DIR, "40M": path}
    return {
        "flip_ms": {f"p{100 * share:g}": percentiles([flips], share)[0] for share in (0.5, 0.95, 0.99)},
        "flips": len(flips),
        "drop_of_all": {name: dropped_alone(model, 3 if quick else 4 * rounds) for name, model in alone.items()},
    }


class Windows:
    """Gaps between tokens of some requests, and which of them overlap one of some stretches of time.

    Those in which a newcomer waits for its first token are left out of all but the longest: its prompt is in the same
    steps.
    """

    def __init__(self, answers: Sequence[Answer], newcomers: Sequence[Answer]) -> None:
        busy = [(answer.sent_s, answer.at_s[0]) for answer in newcomers]
        all_gaps = [list(zip(answer.at_s, answer.at_s[1:], strict=False)) for answer in answers]
        self._all = all_gaps
        self._gaps = [[gap for gap in gaps if not _overlaps(gap, busy)] for gaps in all_gaps]

    def within(self, windows: Sequence[tuple[float, float]]) -> list[float]:
        pairs = (pair for gaps in self._gaps for pair in gaps)
        return [gap[1] - gap[0] for gap in pairs if _overlaps(gap, windows)]

    def longest(self, window: tuple[float, float]) -> list[float]:
        """Return of each request that generates then the longest gap."""
        found = [[gap[1] - gap[0] for gap in gaps if _overlaps(gap, [window])] for gaps in self._all]
        return [max(gaps) for gaps in found if gaps]


def _overlaps(gap: tuple[float, float], windows: Sequence[tuple[float, float]]) -> bool:
    return any(gap[0] < end and gap[1] > begin for begin, end in windows)


def exchange(path: Path, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    figures: dict[str, dict[str, list[float]]] = {}

    def take(name: str) -> dict[str, float]:
        with fleet(path, CORES, engine=ENGINE, routing="round_robin") as engine:
            warm_up(engine)
            return exchanged(engine, FORMS[name], quick)

    for round_ in range(rounds):
        for name in random.sample(list(FORMS), len(FORMS)):
            figure = figures.setdefault(name, {})
            for key, value in kept.take(f"exchange, {round_}, {name}", partial(take, name)).items():
                figure.setdefault(key, []).append(value)
    live = figures["live"]
    return {
        **{
            name: {
                "seconds": summary(figure["seconds"]),
                "predicted_seconds": summary(figure["predicted_s"]),
                "restore_seconds": summary(figure["restore_s"]),
                "predicted_restore_seconds": summary(figure["predicted_restore_s"]),
                "moved_bytes": statistics.median(figure["moved_bytes"]),
                "stall_ms": summary([1e3 * value for value in figure["stall_s"]]),
                "stall_of_exchange": ratio(figure["stall_s"], figure["seconds"]),
                "others_p99_gap_over_rest": ratio(figure["others_p99"], figure["rest_p99"]),
                "others_mean_gap_over_rest": ratio(figure["others_mean"], figure["rest_mean"]),
                "others_longest_gap_over_rest": ratio(figure["others_longest"], figure["rest_longest"]),
                "new_ttft_over_rest": ratio(figure["new_ttft_s"], figure["rest_ttft_s"]),
            }
            for name, figure in figures.items()
        },
        "others_p99_gap_over_live": {
            name: ratio(figure["others_p99"], live["others_p99"]) for name, figure in figures.items() if name != "live"
        },
    }


def exchanged(
    engine: elastic.Fleet, form: dict[str, Any], quick: bool, half: range = HALF, new: int = 700
) -> dict[str, float]:
    """Have one instance drop half of its layers and take them back some times, with three long requests at each."""
    first, second = names(engine)
    times, length, new, rest_s = (2, 200, 300, 1.0) if quick else (4, 600, new, 2.0)
    load, choose = Load(engine), random.Random(SEED)
    asked = [Request(prompt(length, choose), new, ignore_eos=True) for _ in range(6)]
    answers = [load.submit(request) for request in asked]
    while min(len(answer.tokens) for answer in answers) < 4:
        time.sleep(0.005)
    drops, copies, rests, done, back, ttft = [], [], [], [], [], {"during": [], "rest": []}
    dropping, returning = [], []  # seconds that dry runs predict

    def newcomers(when: str) -> None:
        for _ in range(2):  # one for each instance, in turn
            ttft[when].append(load.submit(Request(prompt(64, choose), 1, ignore_eos=True)))

    for number in range(times):
        begin = time.perf_counter()
        if number % 2:
            newcomers("rest")
        time.sleep(rest_s)
        if not number % 2:
            rests.append((begin, time.perf_counter()))
        dropping.append(engine.drop(layers={first: half, second: ()}, dry_run=True, **form).seconds)
        begin = time.perf_counter()
        if number % 2:
            newcomers("during")
        with copies_noted() as ends:
            done.append(engine.drop(layers={first: half, second: ()}, **form))
        drops.append((begin, time.perf_counter()))
        if not number % 2:
            copies.append((begin, ends[0]))
        returning.append(engine.restore(dry_run=True).seconds)
        back.append(engine.restore())
    where = [engine.instance_of(request.id) for request in asked]
    for request in asked:
        engine.cancel(request.id)
    load.wait()
    if any(one.status != "applied" for one in done):
        raise RuntimeError(f"a drop was not applied: {[one.why for one in done]}")
    new_ones = [*ttft["during"], *ttft["rest"]]
    moved = Windows([answer for answer, at in zip(answers, where, strict=True) if at == first], new_ones)
    others = Windows([answer for answer, at in zip(answers, where, strict=True) if at == second], new_ones)
    usual = statistics.median(moved.within(rests))
    return {
        "seconds": statistics.median(one.seconds for one in done),
        "predicted_s": statistics.median(dropping),
        "restore_s": statistics.median(one.seconds for one in back),
        "predicted_restore_s": statistics.median(returning),
        "moved_bytes": statistics.median(one.moved_bytes for one in done),
        "stall_s": max(max(moved.longest(window)) - usual for window in drops),
        "others_p99": percentiles([others.within(copies)], 0.99)[0],
        "rest_p99": percentiles([others.within(rests)], 0.99)[0],
        "others_mean": statistics.fmean(others.within(copies)),
        "rest_mean": statistics.fmean(others.within(rests)),
        "others_longest": statistics.median(max(others.longest(window)) for window in copies),
        "rest_longest": statistics.median(max(others.longest(window)) for window in rests),
        "new_ttft_s": max(answer.ttft_s for answer in ttft["during"]),
        "rest_ttft_s": max(answer.ttft_s for answer in ttft["rest"]),
    }


def prices(path: Path, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    """Compare prices that were told ahead with what was lost; those of a first change are not learned yet."""
    figures: dict[str, dict[str, list[float]]] = {}

    def take() -> list[tuple[str, dict[str, float]]]:
        with fleet(path, CORES, engine=ENGINE, routing="round_robin") as engine:
            warm_up(engine)
            return list(priced_changes(engine, 2 if quick else 4, 1.0 if quick else 2.0))

    for round_ in range(rounds):
        for name, told in kept.take(f"prices, {round_}", take):
            for key, value in told.items():
                figures.setdefault(name, {}).setdefault(key, []).append(value)
    return {name: {key: summary(values) for key, values in figure.items()} for name, figure in figures.items()}


def priced_changes(engine: elastic.Fleet, times: int, rest_s: float) -> Iterator[tuple[str, dict[str, float]]]:
    """Have two instances with three long requests each drop layers and take them back, and then a request move."""
    load, choose = Load(engine), random.Random(SEED)
    asked = [Request(prompt(200 if times < 4 else 600, choose), 4000, ignore_eos=True) for _ in range(6)]
    answers = [load.submit(request) for request in asked]
    while min(len(answer.tokens) for answer in answers) < 4:
        time.sleep(0.005)

    def tokens_since(begin_s: float) -> int:
        return sum(sum(at_s >= begin_s for at_s in answer.at_s) for answer in answers)

    def pace() -> float:
        began_s = time.perf_counter()
        time.sleep(rest_s)
        return tokens_since(began_s) / (time.perf_counter() - began_s)

    def changed(act: Callable[[], Any], planned_s: float, slower: float) -> dict[str, float]:
        before, began_s = pace(), time.perf_counter()
        act()
        took_s = time.perf_counter() - began_s
        lost_s, after = took_s - tokens_since(began_s) / before, pace()
        longer = before / after - 1
        told = {"price_s": planned_s, "lost_s": lost_s + HORIZON_S * longer, "lost_meanwhile_s": lost_s}
        return told | {"slower_said": slower, "slower": longer, "meanwhile_said_s": planned_s - HORIZON_S * slower}

    first, second = names(engine)
    halves = {first: HALF, second: OTHER_HALF}
    for number in range(times):
        when = "later" if number else "first"
        price = engine.drop(layers=halves, dry_run=True).price
        yield f"{when} drop", changed(partial(drop_half, engine), price.seconds, price.slower)
        price = engine.restore(dry_run=True).price
        yield f"{when} restore", changed(engine.restore, price.seconds, price.slower)
    for number, request in enumerate(request for request in asked if engine.instance_of(request.id) == first):
        need = TOKEN_BYTES * (len(request.prompt) + len(load.answers[request.id].tokens))
        price_s = next(offer.seconds for offer in engine.plan(need) if offer.kind == "move")
        told = changed(partial(engine.move, request.id, second), price_s, 0.0)
        yield f"{'later' if number else 'first'} move", {key: told[key] for key in ("price_s", "lost_meanwhile_s")}
    for request in asked:
        engine.cancel(request.id)
    load.wait()


def waves(rates: Rates, seed: int) -> list[Arrival]:
    """Draw two waves and the calm between them."""
    choose = random.Random(seed)
    wave_s, calm_s = WAVE * rates.fit / (WAVE_RATE * rates.most), WAVES_APART * rates.lasts_s / 2
    parts = (
        ("wave", wave_s, WAVE_RATE * rates.most),
        ("calm", calm_s, rates.calm),  # in which what the wave left ends
        ("late calm", calm_s, rates.calm),
        ("second", wave_s, WAVE_RATE * rates.most),
    )
    found: list[Arrival] = []
    begin = 0.0
    for part, length_s, rate in parts:
        found += drawn_in(choose, part, begin, length_s, rate)
        begin += length_s
    return found


def restoration(path: Path, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    rates = rates_kept(path, quick, kept)
    policies = {"restored": OVERLOAD, "never": elastic.Overload(**{**vars(OVERLOAD), **NEVER})}
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in policies}
    events = Counter[str]()
    for round_ in range(rounds):
        arrivals = waves(rates, SEED + round_)
        for name in random.sample(list(policies), len(policies)):
            take = partial(through_waves, path, policies[name], arrivals)
            told, acted = kept.take(f"restoration, {round_}, {name}", take)
            events.update({f"{name}: {kind}": count for kind, count in acted.items()})
            for key, value in told.items():
                figures[name].setdefault(key, []).append(value)
    return {
        **{name: {key: summary(values) for key, values in figure.items()} for name, figure in figures.items()},
        "restored_over_never": {key: ratio(v, figures["never"][key]) for key, v in figures["restored"].items()},
        "events": dict(events),
    }


def through_waves(
    path: Path, policy: elastic.Overload, arrivals: Sequence[Arrival]
) -> tuple[dict[str, float], dict[str, int]]:
    """Play waves to a fleet with a policy; return what requests had of it, and how often it acted."""
    with fleet(path, CORES, place=PLACE, engine=ENGINE, policy=policy) as engine:
        warm_up(engine)
        load = play(engine, arrivals)
        events = Counter(event.kind for event in engine.events())
    of: dict[str, list[Answer]] = {}
    for arrival in arrivals:
        of.setdefault(arrival.part, []).append(load.answers[arrival.request.id])
    calm = of["late calm"]
    told = {
        "p50_ttft_in_calm_s": statistics.median(answer.ttft_s for answer in calm),
        "p50_tpot_in_calm_s": statistics.median(statistics.mean(answer.gaps_s) for answer in calm),
        "p99_ttft_in_second_s": percentiles([[answer.ttft_s for answer in of["second"]]], 0.99)[0],
    }
    return told, dict(events)


def extreme(path: Path, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    rates = rates_kept(path, quick, kept)
    lasted: dict[str, list[float]] = {"wait": [], "drop": []}
    held: dict[str, list[float]] = {"wait": [], "drop": []}

    def take(name: str, round_: int) -> tuple[float, int]:
        with fleet(path, CORES, place=PLACE, engine=ENGINE, policy=OVERLOAD if name == "drop" else None) as engine:
            warm_up(engine)
            return overrun(engine, rates, SEED + round_, 5.0 if quick else MOST_S), tokens_held(engine)

    for round_ in range(rounds):
        for name in random.sample(list(lasted), 2):
            seconds, tokens = kept.take(f"extreme, {round_}, {name}", partial(take, name, round_))
            lasted[name].append(seconds)
            held[name].append(tokens)
    times = ratio(lasted["drop"], lasted["wait"])
    more = ratio(held["drop"], held["wait"])
    return {
        "seconds": {name: summary(values) for name, values in lasted.items()},
        "longer": times,
        "more_capacity": more,
        "of_capacity_ratio": times["median"] / more["median"],
        "most_s": MOST_S,
    }


def overrun(engine: elastic.Fleet, rates: Rates, seed: int, most_s: float) -> float:
    """Submit too many requests until one waits too long for its first token; return the seconds until it came."""
    load, choose = Load(engine), random.Random(seed)
    begin = next_s = time.perf_counter()
    patience_s = PATIENCE * rates.ttft_s
    late = None
    while late is None and time.perf_counter() - begin < most_s:
        next_s += choose.expovariate(OVERRATE * rates.most)
        time.sleep(max(0.0, next_s - time.perf_counter()))
        load.submit(drawn(choose))
        now = time.perf_counter()
        waited = (a for a in load.answers.values() if (a.at_s[0] if a.at_s else now) - a.sent_s > patience_s)
        late = next(waited, None)
    for request in load.answers:
        engine.cancel(request)
    load.wait()
    return (late.sent_s if late is not None else time.perf_counter()) - begin


def kill(path: Path, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    """Lose one of two ranks at a random moment; every answer is held against the model's own."""
    count, new = (4, 60) if quick else (16, 120)
    choose = random.Random(SEED)
    asked = [Request(prompt(96, choose), new, ignore_eos=True) for _ in range(count)]
    with in_process(path) as engine:
        right = [answer.tokens for answer in served(engine, asked).answers.values()]
    figures: dict[str, dict[str, list[float]]] = {}
    for how, number in SIGNALS.items():
        for round_ in range(rounds):
            take = partial(lost_rank, path, asked, right, number, choose.randrange(new // 4, new // 2))
            for key, value in kept.take(f"kill, {round_}, {how}", take).items():
                figures.setdefault(how, {}).setdefault(key, []).append(value)
    return {
        how: {
            "next_token_s": summary(of["next_token_s"]),
            "lost": sum(of["lost"]),
            "wrong": sum(of["wrong"]),
            "recomputed_tokens": summary(of["recomputed_tokens"]),
            "tokens_of_live": summary(of["tokens_of_live"]),
            "recomputed_of_live": ratio(of["recomputed_tokens"], of["tokens_of_live"]),
            "requests": count * rounds,
        }
        for how, of in figures.items()
    }


def lost_rank(
    path: Path, asked: Sequence[Request], right: Sequence[Sequence[int]], number: int, wanted: int
) -> dict[str, float]:
    """Send a signal to a rank in a group when each request has so many tokens."""
    with fleet(path, CORES, engine=ENGINE) as engine:
        warm_up(engine)
        load = Load(engine)
        answers = [load.submit(request) for request in asked]
        drop_half(engine)
        while min(len(answer.tokens) for answer in answers) < wanted:
            time.sleep(0.005)
        live = [request for request, a in zip(asked, answers, strict=True) if a.finish is None]
        had = sum(len(r.prompt) + len(load.answers[r.id].tokens) for r in live)
        begin = time.perf_counter()
        os.kill(engine.status().ranks[wanted % 2].pid, number)
        load.wait()
        afterwards = ([t for t in load.answers[request.id].at_s if t > begin + 0.05] for request in live)
        return {
            "next_token_s": max((at_s[0] - begin for at_s in afterwards if at_s), default=0.0),
            "lost": sum(answer.finish != "length" for answer in answers),
            "wrong": sum(answer.tokens != tokens for answer, tokens in zip(answers, right, strict=True)),
            "recomputed_tokens": engine.status().totals.recomputed_tokens,
            "tokens_of_live": had,
        }


ROWS = {row.__name__: row for row in (capacity, pause, exchange, prices, restoration, extreme, kill)}


def main() -> None:
    more = {"only": {"nargs": "*", "choices": list(ROWS), "default": list(ROWS), "help": "rows to take"}, "keep": KEEP}
    options = arguments(__doc__.splitlines()[0], **more)
    if options.device != "cpu":
        sys.exit("this benchmark pins ranks to cores: it is for a CPU")
    rounds = 1 if options.quick else min(options.rounds, 5)
    results: dict[str, Any] = {}
    kept = Kept(options.keep)
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder))
        for name in options.only:
            results[name] = ROWS[name](path, rounds, options.quick, kept)
            table([name, ""], list(flat(results[name])))
            print(flush=True)
    finish("drop", "cpu", results)


if __name__ == "__main__":
    main()
