"""What a server knows of a fleet: that an engine is one, views of its ranks, and actions on all of them.

Way in: `fleet.as_fleet`, `views.RankViews`, `targets.ActionTargets`. The rest of the server imports it.
"""
