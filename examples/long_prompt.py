"""A prompt that no process could hold by itself: two share their layers for it, short requests go on, and they part."""

import threading
import time

from transformers import AutoTokenizer

import elastic
from elastic.assets import MODEL_DIR

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)
BLOCK = 16
"""Tokens of a block of KV cache."""
SHORT = tuple(TOKENIZER.encode("class Reader:\n    def read(self"))


class Answer:
    """The tokens of one request, as they come."""

    def __init__(self, fleet: elastic.Fleet, prompt: tuple[int, ...], tokens: int) -> None:
        self.tokens: list[int] = []
        self.ended = threading.Event()
        fleet.submit(elastic.Request(prompt, tokens, ignore_eos=True), self.listen)

    def listen(self, output: elastic.Output) -> None:
        """Take new tokens. Called on a thread of the fleet."""
        self.tokens += output.tokens
        if output.finish:
            self.ended.set()


def main() -> None:
    lengths = elastic.Lengths(most_ranks=2, dwell_s=0.5)
    options = {"shards": 2, "engine": {"block_tokens": BLOCK}, "policy": lengths}
    with elastic.Fleet(str(MODEL_DIR), ranks=2, places=["cpu=16MiB"], **options) as fleet:
        capacity = {degree: BLOCK * min(c[degree] for c in fleet.capacity([1, 2]).values()) for degree in (1, 2)}
        print(f"tokens that fit one process: {capacity[1]:,}; two that share their layers: {capacity[2]:,}")

        short = Answer(fleet, SHORT, 120)
        short.ended.wait()
        long_prompt = (SHORT * capacity[2])[: capacity[1] + 100]
        beside, long = Answer(fleet, SHORT, 120), Answer(fleet, long_prompt, 20)
        long.ended.wait()
        print(f"a prompt of {len(long_prompt):,} tokens had its answer: {len(long.tokens)} tokens")
        beside.ended.wait()
        print("the short one beside it has the text that it has by itself:", beside.tokens == short.tokens)

        until = time.monotonic() + 30
        while fleet.groups() and time.monotonic() < until:
            time.sleep(0.05)
        for event in fleet.events():
            if event.kind in ("resharded", "parted"):
                print(f"{event.kind}: {event.rank}; {event.moved_bytes:,} bytes of KV copied")


if __name__ == "__main__":
    main()
