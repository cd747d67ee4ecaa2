"""Acts of `elastic demo` that need more than one model.

Way in: `dropped_layers.serve_a_burst`.
"""
