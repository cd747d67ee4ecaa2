"""The most sectors that each instance of a group may have: changed under running requests, and as they are needed.

Way in: `change.CapChange`, `follow.follow`.
"""
