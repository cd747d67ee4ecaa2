"""What a deployment would cost, before there is one: configurations, their seconds, the paper's methods. (iServe)

Way in: `ranking.rank`, of `Candidate`s whose bytes and costs `elastic.estimation` finds. Pure functions, without torch:
a simulator and planners of placements use them too.
"""
