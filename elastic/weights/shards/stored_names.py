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

    What transformers does to entries when it loads the model, or the one inside an adapter, is read from its own rules;
    those that do more than to stack experts are left out.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    model = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if model is None:
        return {}
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, blocks = model.state_dict(), Blocks()
    for entry in files.names:
        name, pattern = rename_source_key(entry, renamings, converters, model.base_model_prefix, state)
        if name == entry:
            continue
        located = files.locate(entry)
        assert located is not None, "it is a name of the files"
        file, key = located
        shape = file.shapes[key]
        if pattern is None:
            blocks[name] = [(entry, (0,) * len(shape))]
        elif [type(step).__name__ for step in by_pattern[pattern].operations] in _JOINED:
            numbers = re.findall(re.escape(pattern).replace(r"\*", r"(\d+)"), entry)
            if numbers:
                matrix = by_pattern[pattern].source_patterns.index(pattern)
                at = int(numbers[-1]), matrix * shape[0], *(0 for _ in shape[1:])
                blocks.setdefault(name, []).append((entry, at))
    return blocks
