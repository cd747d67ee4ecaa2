"""Fleets in simulated time: the engine's scheduler, the fleet's dispatcher and its policies, without models.

Only three things are modelled: seconds of steps, seconds of transfers, and pages. Way in: `scenario.read_scenario` and
`run.simulate`. `cli` and benchmarks import it; it may import all other rooms but the server.
"""
