"""What a server knows of a fleet: views of its ranks, and actions on all of them.

Way in: `views.RankViews`, `targets.ActionTargets`. The rest of the server imports it.
"""
