"""Pruned matrices: which weights stay, how they are stored, and products with them on CPUs and CUDA.

Way in: `sparse_format` and `structured_format`, which register the formats. `elastic.quant.variants` imports it; it
imports `elastic.quant.formats` and the common ground of `elastic.quant.kernels`.
"""
