"""Which ranks have which layers of an instance, and what changes between two such states: pure functions of records.

Way in: `arrangement.Arrangement`, `transfers.moves`, `routes.routes`, `flips.flip_order`, `stages.stages`,
`drop.drop_plan`. Policies, fleets, executors and simulators import it; nothing here knows a process or a tensor.
"""
