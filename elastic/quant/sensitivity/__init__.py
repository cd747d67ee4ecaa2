"""Which layers to swap first: scores of a model with some layers quantized (MorphServe, section 3.2).

Way in: `scores.measure`, `profile_file.Profile`, `order`. `elastic.profile`, the runtime and the CLI import it.
"""
