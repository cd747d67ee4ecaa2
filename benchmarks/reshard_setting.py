"""The model of `reshard.py` and the memory of its ranks, by what they run on.

On GPUs its layers are twelve of Llama-3-8B; quickly, two small ones whose parts are a page of 2 MiB each. Ranks are on
the GPUs in turn, or all on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from serving import save_model

BLOCK_TOKENS, SHARDS = 32, 4
SHARE, ROOMY_SHARE = 0.63, 0.3
"""Of a rank's memory, decoder layers."""


@dataclass(frozen=True)
class Sizes:
    """Of a model, and of the requests to it."""

    hidden: int
    inside: int
    layers: int
    heads: int
    kv_heads: int
    positions: int
    dtype: torch.dtype
    prompt: int
    """Tokens of each prompt that runs while layers change their rank."""
    most_batch_tokens: int = 256
    use: float = 0.9
    """Of the KV cache, where most of it is to be in use."""

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_size * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Weights of all decoder layers."""
        matrices = 2 * self.hidden**2 + 2 * self.hidden * self.kv_heads * self.head_size + 3 * self.hidden * self.inside
        return self.layers * self.dtype.itemsize * matrices

    @property
    def config(self) -> dict[str, int]:
        """Of the model, beside what all have in common."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inside,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.positions,
        }


ON_CPU = Sizes(512, 1536, 12, 8, 8, 8192, torch.float32, prompt=500)
ON_GPU = Sizes(4096, 14336, 12, 32, 8, 32768, torch.bfloat16, prompt=8000, most_batch_tokens=2048)
REHEARSED = Sizes(512, 8192, 2, 8, 8, 2048, torch.bfloat16, prompt=100, use=0.02)


@dataclass(frozen=True)
class Setting:
    """What rows of `reshard.py` are taken of."""

    path: Path
    """Of the model."""
    device: str
    """`cpu` or `cuda`."""
    quick: bool
    sizes: Sizes

    @classmethod
    def make(cls, folder: Path, device: str, *, quick: bool) -> Setting:
        """Write the model to a folder. `device`: `cpu`, or any GPU."""
        on_gpu = device.startswith("cuda")
        sizes = ON_CPU if not on_gpu else REHEARSED if quick else ON_GPU
        path = save_model(folder, device=device, dtype=sizes.dtype, **sizes.config)
        return cls(path, "cuda" if on_gpu else "cpu", quick, sizes)

    @property
    def engine(self) -> dict[str, Any]:
        """Options of the ranks' engines."""
        most = {"max_requests": 64, "max_batch_tokens": self.sizes.most_batch_tokens}
        return {"block_tokens": BLOCK_TOKENS, "share_prefixes": False, **most}

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt that runs while layers change their rank."""
        return 100 if self.quick else self.sizes.prompt

    def device_of(self, number: int) -> str:
        """Return the device of a rank."""
        return "cpu" if self.device == "cpu" else f"cuda:{number % torch.cuda.device_count()}"

    def place(self, number: int, share: float = SHARE) -> str:
        """Return the memory of a rank, of which decoder layers are such a share."""
        return f"{self.device_of(number)}#{number}={self._mebibytes(share)}MiB"

    def cores(self, count: int) -> list[tuple[int, ...]]:
        """Return the cores of so many ranks: one of two each; of those on GPUs, all."""
        return [(number % 2,) if self.device == "cpu" else () for number in range(count)]

    def _mebibytes(self, share: float) -> int:
        if self.device == "cpu":
            return 246 if share == SHARE else 512
        beside = 256 if self.quick else 768  # embedding and head; quickly, pages of each part of the heads, too
        return int(self.sizes.layer_bytes / share + beside * 2**20) >> 20
