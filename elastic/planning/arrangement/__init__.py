"""Which instances drop which layers, who gets what of the keys and values, and the cut of layers into stages.

Way in: `drop.drop_plan`, `stages.stages`, `caps`. Policies, fleets, executors and simulators import it; nothing here
knows a process or a tensor.
"""
