"""An engine whose layers are computed by several ranks: the path of its steps, and what goes from rank to rank.

Way in: `path.LayerPath`, `home.HomeExecutor`, `stage.GuestStage`, `transport.Transport`. The `continuous` room imports
it; it imports the executor.
"""
