"""The order in which to swap layers: scores of a model with some layers quantized (MorphServe, section 3.2).

Way in: `scores.measure`, `profile_file.Profile`, `order`. `elastic.profile`, the runtime and the CLI import it.
"""
