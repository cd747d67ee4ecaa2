"""Simulated servers and clusters for policies and planners."""
