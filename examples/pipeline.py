"""A transformers pipeline over a wrapped model: nothing in it knows, and nothing needs to."""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import elastic
from elastic.assets import MODEL_DIR

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--model", default=MODEL_DIR, help="model directory (default: the small one inside)")
path = options.parse_args().model

model = elastic.wrap(AutoModelForCausalLM.from_pretrained(path, dtype="float32"), variants=["int8"])
writer = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(path))
prompts = ["import os\n", "class Reader:\n    def read(self", "for line in"]


def write() -> list[str]:
    answers = writer(prompts, max_new_tokens=24, do_sample=False)
    return [answer[0]["generated_text"] for answer in answers]


full = write()
model.elastic.swap(range(model.elastic.status().layers), "int8")  # every layer
packed = write()
for prompt, one, other in zip(prompts, full, packed, strict=True):
    print(f"{prompt!r}\n  in full  {one.removeprefix(prompt)!r}\n  in int8  {other.removeprefix(prompt)!r}")

weights = sum(size for owner, size in model.elastic.status().places[0].owners.items() if owner.startswith("layer:"))
model.elastic.restore()
print(f"{weights / 2**20:.2f} MiB of layers in int8; restored: {write() == full}")
