"""How long chunks of prompts and steps of pipelines take: pure functions of records.

Way in: `chunk_cost.ChunkCost`, `step_time.shared_round_s`.
"""
