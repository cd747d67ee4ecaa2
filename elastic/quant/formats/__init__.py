"""Packed matrices apart from their kernels: formats, integer codes, the frozen table of kernels.

Way in: `base.Format`, `base.register`, `base.format_of`, `integer.Integers`, `kernel_table.paths`.
All of `elastic.quant` imports it; it imports only the leaves.
"""
