"""Proxies of weights that are not plain in their Parameter slot: a tensor subclass, and sources of its value.

Way in: `tensor.WeightProxy` and `tensor.register`. `elastic.weights`, `elastic.quant` and `elastic.hooks` import it.
"""
