"""Instances that compute each other's layers: how they come to it, and part again (KunServe, section 4).

Way in: `verbs.GroupVerbs`, of `Fleet`, and `groups.Groups`, which has the groups there are, and has them change.
"""
