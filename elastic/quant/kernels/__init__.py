"""Products with packed matrices on CPUs and CUDA, and the layouts that they read.

Way in: `integer_format`, which registers the format; `marlin`, an opt-in plug-in that its user imports.
`elastic.quant.variants` imports it; it imports `elastic.quant.formats`.
"""
