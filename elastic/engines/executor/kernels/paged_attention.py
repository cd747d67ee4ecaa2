"""Attention on a CPU over keys and values where they lie (PagedAttention, Kwon et al. 2023, section 4.3).

torch's operators copy the blocks of all sequences before they attend to them, padded to the longest. This kernel reads
each where it is, and computes in float32 whatever is stored; a head of a token has the same bits in any batch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from elastic.compiler import compiled_library
from elastic.engines.executor.block_layout import BlockLayout, CacheParts
from elastic.kvcache.score_terms import ScoreTerms

SOURCE = Path(__file__).with_name("paged_attention.cpp")
LANES = 8
"""Of the kernel's vectors: the dimensions of a head are a multiple of it."""
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Layout(ctypes.Structure):
    """How blocks lie in a layer's cache: see the source."""

    _fields_ = [(name, ctypes.c_int64) for name in ("places", "heads", "slots", "tokens", "dim")]


_PTR, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_CACHE = (ctypes.POINTER(_Layout), _PTR, _INT, _PTR)  # layout, places, heads, elements
_SEQUENCES = (_PTR, _INT, _PTR, _PTR, _PTR, _INT)  # tables, their step, seen, first, counts, how many
_QUERIES = (_PTR, _INT, _INT, _INT)  # elements, steps, query heads of a KV head
_ATTEND = (*_CACHE, *_SEQUENCES, *_QUERIES, _FLOAT, _FLOAT, _PTR, _PTR, ctypes.c_int)
_WRITE = (*_CACHE, _INT, _PTR, _PTR, _INT, _PTR, _INT, _INT, _PTR, _INT, _INT)


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of sequences: int64 tensors on the CPU, [sequences] but for the tables."""

    tables: torch.Tensor
    """[sequences, blocks]: the blocks of each, in the order of the text."""
    seen: torch.Tensor
    """Tokens in these that its last new token sees, from the first on; each before it sees one less."""
    first: torch.Tensor | None = None
    """Where in the batch its new tokens begin; None: each has one, in this order."""
    counts: torch.Tensor | None = None
    """How many they are; None: one each."""


class PagedAttention:
    """The kernel for one layout of blocks, with states of one dtype."""

    def __init__(self, library: ctypes.CDLL, layout: BlockLayout, dtype: torch.dtype) -> None:
        """`dtype`: float32 or bfloat16."""
        shape, stored = layout.shape, "" if layout.stored is None else "_int8"
        self._layout = _Layout(layout.rows, layout.row_heads, layout.slots, shape.tokens, shape.dim)
        self._attend, self._write = library[f"attend_{_DTYPES[dtype]}{stored}"], library["write"]
        self._attend.argtypes, self._write.argtypes = _ATTEND, _WRITE
        self._attend.restype = self._write.restype = None
        self.writes = layout.stored is None
        """Whether it writes new tokens, too: into blocks of 8 bits it does not."""

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        parts: CacheParts,
        new: NewTokens,
        scaling: float | None,
        terms: ScoreTerms | None,
        out: torch.Tensor,
    ) -> None:
        """Attend for new tokens whose keys and values are in the cache.

        Query [heads, tokens, dim], of the dtype, of all of a batch; cache [elements], of the layer. Writes those rows
        of `out` [tokens, heads, dim], contiguous, that are these tokens'.
        """
        heads, _, dim = query.shape
        query = _with_rows(query)
        cap, sinks = (None, None) if terms is None else (terms.softcap, terms.sinks)
        sinks = None if sinks is None else sinks.float().contiguous()
        self._attend(
            self._layout,
            parts.places.data_ptr(),
            parts.heads,
            cache.data_ptr(),
            new.tables.data_ptr(),
            new.tables.stride(0),
            new.seen.data_ptr(),
            None if new.first is None else new.first.data_ptr(),
            None if new.counts is None else new.counts.data_ptr(),
            len(new.seen),
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            heads // parts.heads,
            dim**-0.5 if scaling is None else scaling,
            cap or 0.0,
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def write(
        self,
        cache: torch.Tensor,
        parts: CacheParts,
        blocks: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Copy keys and values [heads, new, dim], of the cache's dtype, to slots [new] of blocks [new], both int64."""
        keys, values = _with_rows(keys), _with_rows(values)
        size = keys.element_size()
        self._write(
            self._layout,
            parts.places.data_ptr(),
            parts.heads,
            cache.data_ptr(),
            size,
            blocks.data_ptr(),
            slots.data_ptr(),
            len(blocks),
            keys.data_ptr(),
            keys.stride(0) * size,
            keys.stride(1) * size,
            values.data_ptr(),
            values.stride(0) * size,
            values.stride(1) * size,
        )


def compiled_attention(layout: BlockLayout, dtype: torch.dtype, device: torch.device) -> PagedAttention | None:
    """Return the kernel for a cache; None: there is none, and torch's operators compute the same."""
    library = attention_library(dtype, layout.shape.dim, device.type)
    return None if library is None else PagedAttention(library, layout, dtype)


def attention_library(dtype: torch.dtype, dim: int, device: str) -> ctypes.CDLL | None:
    """Return what has the kernels for heads of `dim` elements on a type of device, "cpu" or "cuda"; None: nothing."""
    if device != "cpu" or dtype not in _DTYPES or dim % LANES:
        return None
    without = "attention is computed by torch's operators, that of decode steps up to six times as long"
    attend = (f"attend_{name}{stored}" for name in _DTYPES.values() for stored in ("", "_int8"))
    return compiled_library(SOURCE, without, "write", *attend)


def _with_rows(states: torch.Tensor) -> torch.Tensor:
    """Return states [..., dim] whose vectors are each in one piece."""
    return states if states.stride(-1) == 1 else states.contiguous()
