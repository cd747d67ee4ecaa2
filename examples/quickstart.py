"""Wrap a model, write; swap layers to int4, write on less memory; restore them, and get the same text again."""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import elastic
from elastic.assets import MODEL_DIR

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--model", default=MODEL_DIR, help="model directory (default: the small one inside)")
path = options.parse_args().model

model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(path)
prompt = tokenizer("class Reader:\n    def read(self", return_tensors="pt")


def write() -> str:
    ids = model.generate(**prompt, max_new_tokens=60, do_sample=False)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


elastic.wrap(model, variants=["int4"])  # the same object, now elastic
rt = model.elastic
first = write()
print(first)

last_four = range(rt.status().layers - 4, rt.status().layers)
change = rt.swap(last_four, "int4")
print(f"\nlayers {change.layers} are int4: {change.released_bytes / 2**20:.2f} MiB more for the KV cache")
print(write())

rt.restore()  # bit for bit
print(f"\nrestored: the text is the first one again: {write() == first}")

rt.check()  # recounts every page
elastic.unwrap(model)  # the model as it was
