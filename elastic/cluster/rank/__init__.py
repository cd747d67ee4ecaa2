"""A rank: one wrapped model and its engine in a process of their own, and the fleet's view of it."""
