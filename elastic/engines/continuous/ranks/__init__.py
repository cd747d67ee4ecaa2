"""What an engine does with other ranks: it computes layers of theirs, they compute some of its own.

Way in: the parts that `ContinuousEngine` has of it, which the cluster asks.
"""
