"""Kernels in C++ for a CPU, compiled on the machine that runs them: attention over a cache in blocks, and operators on
elements.

Way in: `paged_attention.compiled_attention`, `elementwise.translate`. The executor and its graphs import it, and
estimates, which ask whether there is a kernel; it imports the layout of blocks.
"""
