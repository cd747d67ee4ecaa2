"""Ranks that compute the layers of one model together."""
