"""Full matrices in the order that a CPU library multiplies fastest: the same bytes in other places of the same pages.

Way in: `onednn.find_layout` and `choice.prepacked_layout`. `elastic.weights` imports it, and engines that ask for it.
"""
