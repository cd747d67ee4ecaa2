"""Packed weights: formats, kernels, checkpoints, variants of layers, and which layers to swap first.

The way in is each sub-room's; nothing lies here. It imports `elastic.weights`, `elastic.memory` and the leaves.
"""
