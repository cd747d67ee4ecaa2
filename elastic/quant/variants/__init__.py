"""Variants of decoder layers: what is packed, how it is made, kept on disk, and what sits in the slots.

Way in: `variant.Variant`, `pack_model.obtain`, `packed_weight.PackedMatrix`. The runtime imports it; it imports
formats, kernels, checkpoints and `elastic.weights.proxy`.
"""
