"""Models that come to devices which they share, each placed by the library's own planner as things are then.

Way in: `deployments.SimulatedDeployments`, of `deployments.PlacementScenario`; `run` has it.
"""
