"""How the weights of a decoder layer are cut over ranks, and where the parts lie on pages: pure functions of shapes.

Way in: `cut_plan.cut_layer` says which parameters are cut, and where: at rows that end on a page
(`bounds.aligned_unit`) if parts are about equal then. `shard_pages` counts the pages that a rank needs for the parts
that it keeps; it gives the others back. Nothing is stored with the paper's padding between parts, of which
`benchmarks/padding.py` tells what it would take. Loading, policies and simulators import this; nothing here knows a
process or a tensor.
"""
