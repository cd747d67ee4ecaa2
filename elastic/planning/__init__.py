"""Plans of where layers and their replicas should be, and their costs: pure functions of frozen records.

Way in: `placement`, `cost_model`, `measured_cost`, `local_search.plan_up`, `scale_down.scale_down`.
The controller, the runtime and `elastic plan` import it; it imports only the leaves.
"""
