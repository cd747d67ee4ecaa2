"""Steps as graphs: the operators of a forward pass, recorded once and called again without the model's Python.

Way in: `step_graphs.StepGraphs`. The `executor` room imports it; it imports hooks, kernels and what attention is given.
"""
