"""Where files have parameters that the model has in another form: experts one by one, under names of their own."""

from __future__ import annotations

import re
from typing import Any

from elastic.memory.checkpoint_file import Checkpoint

_JOINED = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
"""What is done to entries of experts: they are stacked, those of two matrices side by side before that."""

Blocks = dict[str, list[tuple[str, tuple[int, ...]]]]


def blocks_of(model: Any, files: Checkpoint) -> Blocks:
    """Return for parameters that the files have in several entries, or under another name, these and where they begin.

    What transformers does to entries when it loads the model is read from its own rules; those that do more than to
    stack experts are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, blocks = model.state_dict(), Blocks()
    for entry in files.names:
        name, pattern = rename_source_key(entry, renamings, converters, model.base_model_prefix, state)
        if name == entry:
            continue
        if pattern is None:
            file, key = _located(files, entry)
            blocks[name] = [(entry, (0,) * len(file.shape(key)))]
        elif [type(step).__name__ for step in by_pattern[pattern].operations] in _JOINED:
            numbers = re.findall(re.escape(pattern).replace(r"\*", r"(\d+)"), entry)
            if numbers:
                at = _begin(files, entry, int(numbers[-1]), by_pattern[pattern].source_patterns.index(pattern))
                blocks.setdefault(name, []).append((entry, at))
    return blocks


def _begin(files: Checkpoint, entry: str, expert: int, matrix: int) -> tuple[int, ...]:
    """Return where the entry of an expert begins in the parameter that all experts are stacked to."""
    file, key = _located(files, entry)
    rows, *others = file.shape(key)
    return expert, matrix * rows, *(0 for _ in others)


def _located(files: Checkpoint, entry: str) -> Any:
    located = files.locate(entry)
    assert located is not None, "it is a name of the files"
    return located
