"""How long chunks of prompts take, and how a queue of them is divided into microbatches: pure functions of records.

Way in: `chunk_cost.ChunkCost`, `microbatches.lookahead`, `step_time.shared_round_s`.
"""
