"""Engines, servers and clients for tests of what stands in front of a model."""
