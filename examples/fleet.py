"""Two processes serve one model: they drop layers and restore them, a request moves, one is killed; the text stays."""

import threading

from transformers import AutoTokenizer

import elastic
from elastic.assets import MODEL_DIR

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)
PROMPT = tuple(TOKENIZER.encode("class Reader:\n    def read(self"))


class Answer:
    """The tokens of one request, as they come."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.begun, self.ended = threading.Event(), threading.Event()

    def listen(self, output: elastic.Output) -> None:
        """Take new tokens. Called on a thread of the fleet."""
        self.tokens += output.tokens
        if len(self.tokens) > 40:
            self.begun.set()
        if output.finish:
            self.ended.set()


def generate(fleet: elastic.Fleet, name: str) -> Answer:
    answer = Answer()
    fleet.submit(elastic.Request(PROMPT, 250, ignore_eos=True, id=name), answer.listen)
    answer.begun.wait()
    return answer


def main() -> None:
    with elastic.Fleet(str(MODEL_DIR), ranks=2, places=["cpu=64MiB"]) as fleet:
        print("ranks:", ", ".join(f"{rank.name} ({rank.state})" for rank in fleet.status().ranks))
        alone = generate(fleet, "alone")
        alone.ended.wait()

        answer = generate(fleet, "in two stages")
        dropped = fleet.drop(need="3MiB")
        print(f"dropped: {dropped.freed_bytes:,} bytes of weights make room for KV, {dropped.flips} layers moved")
        restored = fleet.restore()
        print(f"restored: {restored.fetched_bytes:,} bytes of weights came back")
        answer.ended.wait()
        print("in two stages and back, the text is the same:", answer.tokens == alone.tokens)

        answer = generate(fleet, "moved")
        here = fleet.instance_of("moved")
        there = next(instance.name for instance in fleet.status().instances if instance.name != here)
        moved = fleet.move("moved", there)
        print(f"moved from {moved.source} to {moved.target}: {moved.moved_bytes:,} bytes of KV while it generated")
        fleet.kill(there)
        answer.ended.wait()
        print("the rank was killed, and the text is the same:", answer.tokens == alone.tokens)
        for event in fleet.events():
            if event.kind in ("lost", "requests resumed"):
                print(f"{event.kind}: {event.requests} requests, {event.recomputed_tokens} tokens computed again")


if __name__ == "__main__":  # ranks are processes of their own
    main()
