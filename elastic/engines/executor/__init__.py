"""The executor of steps in this process: one forward pass of the wrapped model over a cache in blocks.

Way in: `model_runner.ModelRunner`, `block_layout.LAYOUTS`. The `continuous` room imports it; it imports `core.step`,
sampling, and the storage of keys and values.
"""
