"""Ranks without a model, for tests of a fleet."""
