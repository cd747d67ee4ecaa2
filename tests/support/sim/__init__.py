"""Fleets in simulated time, for tests."""
