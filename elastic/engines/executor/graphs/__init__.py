"""Steps as graphs: the operators of a forward pass, recorded once and called again without the model's Python.

Ways in: `step_graphs.StepGraphs`, and `layer_graphs.LayerGraphs` where other ranks compute some layers. The `executor`
and `pipeline` rooms import it; it imports hooks, kernels and what attention is given.
"""
