"""The embedded engine's core: a pure scheduler over logical blocks, and the executor of its steps.

Ways in: `scheduler.Scheduler` and `block_manager.BlockManager`, which know neither torch nor threads; `step`, the
records between scheduler and executor.
"""
