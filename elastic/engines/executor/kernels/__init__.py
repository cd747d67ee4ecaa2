"""Kernels in C++ for attention over a cache in blocks on a CPU, compiled on the machine that runs them.

Way in: `paged_attention.compiled_attention`. The executor alone imports it; it imports the layout of blocks.
"""
