"""Measurements of fingerprints that are kept: the guest that makes them in spare time, and the map that keeps them.

Way in: `guest.Guest` and `store.ProfileStore`. Deployments import them.
"""
