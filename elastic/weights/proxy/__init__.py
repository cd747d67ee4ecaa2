"""What sits in a Parameter slot when the weight is not plain there: a tensor subclass, and where its value comes from.

Way in: `tensor.WeightProxy` and `tensor.register`. `elastic.weights`, `elastic.quant` and `elastic.hooks` import it.
"""
