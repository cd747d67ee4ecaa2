"""A model's weights: decoder layers as units in pages of one place, their precision, and streaming of absent ones.

Way in: `model.ModelWeights`, `layer.WeightUnit`, `decoder.find_decoder`, `paging`. Hooks, quantization, actions and
the runtime import it; it imports `elastic.memory` and the leaves.
"""
