"""One thread writes, another moves memory under it: what an action will do, what it did, and what it cost."""

import argparse
import threading

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import elastic
from elastic.assets import MODEL_DIR

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--model", default=MODEL_DIR, help="model directory (default: the small one inside)")
path = options.parse_args().model

model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(path)
elastic.wrap(model, places=["cpu=1GiB"], variants=["int8", "int4"])
rt = model.elastic
last = rt.status().layers - 1

# A dry run says what actions would do, and does nothing.
for step in rt.plan([elastic.Swap((last - 1, last), "int4"), elastic.Release((0,)), elastic.ResizeKV("cpu", 8 << 20)]):
    print(f"would: {step.action}: {step.status}, moves {step.moved_bytes:,} bytes, frees {step.released_pages} pages")

# Actions, called while the model generates in a thread; each is done between two of its forward passes.
acts = [
    ("two layers to int4", lambda: rt.swap([last - 1, last], "int4")),
    ("one on to int8", lambda: rt.swap(last, "int8")),
    ("8 MiB of KV cache", lambda: rt.kv.resize("8MiB")),
    ("none, which has to wait for the generation", lambda: rt.kv.resize(0)),
    ("all there is", lambda: rt.kv.resize(rt.kv.maximum_bytes)),
    ("the full weights", lambda: rt.restore()),
]
streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
prompt = tokenizer("def read_file(path):\n", return_tensors="pt")
arguments = {**prompt, "max_new_tokens": 120, "do_sample": False, "streamer": streamer}
writing = threading.Thread(target=model.generate, kwargs=arguments)
writing.start()
pieces = 0
for pieces, _piece in enumerate(streamer, start=1):
    if pieces % 8 == 0 and acts:
        words, act = acts.pop(0)
        result = act()
        print(f"after {pieces} pieces of text: {words}: {result.status}, {result.released_bytes:,} bytes freed")
writing.join()
print(f"the generation went on to its end: {pieces} pieces")

for event in rt.events():
    price = f"{event.prepare_ms:.2f} ms beside it, then held it for {event.pause_ms:.3f} ms"
    print(f"{event.action}: {event.outcome}; prepared in {price}")
rt.check()
elastic.unwrap(model)
