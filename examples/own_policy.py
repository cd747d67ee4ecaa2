"""A policy of your own: the controller asks it ten times a second, and has done what it answers."""

import argparse
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

import elastic
from elastic import Plan, Snapshot
from elastic.assets import MODEL_DIR

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--model", default=MODEL_DIR, help="model directory (default: the small one inside)")
path = options.parse_args().model


class HalfInInt8:
    """The upper half of the layers is int8 while the KV cache holds anything, and full again after it."""

    def decide(self, snapshot: Snapshot, state: object) -> Plan:
        packed = tuple(i for i, variant in enumerate(snapshot.layers) if variant == "int8")
        if snapshot.busy:
            return Plan((), "what was asked for is under way")
        if snapshot.kv.used_bytes and not packed:
            count = len(snapshot.layers)
            return Plan((elastic.Swap(tuple(range(count // 2, count)), "int8"),), "the KV cache is in use")
        if packed and not snapshot.kv.used_bytes:
            return Plan((elastic.Restore(packed),), "the KV cache is empty")
        return Plan((), "all is as it should be")


tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").requires_grad_(False)
elastic.wrap(model, variants=["int8"], policy=HalfInInt8())
rt = model.elastic

prompt = tokenizer("class Reader:\n    def read(self", return_tensors="pt")
ids = model.generate(**prompt, max_new_tokens=120, do_sample=False)
print(f"{ids.shape[1]} tokens")

deadline = time.monotonic() + 30
while len(rt.events()) < 2 and time.monotonic() < deadline:
    time.sleep(0.1)
for event in rt.events():
    print(f"{event.action}: {event.outcome}, because {event.why}; it held the model for {event.pause_ms:.3f} ms")
print(rt.health())
elastic.unwrap(model)
