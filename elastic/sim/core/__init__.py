"""A fleet on a clock of events: the scheduler and blocks of the engine, the dispatcher of the fleet, pages as counts.

Way in: `fleet.SimulatedFleet`. The other rooms of the simulator import it.
"""
