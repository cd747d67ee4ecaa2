"""Which instance takes a request, and which become one, of more ranks, for requests too long for each. (AMOEBA)

Way in: `policy.LengthPolicy.decide`, of a `snapshot.LengthSnapshot`. Pure: a fleet acts on its plans, simulators too.
"""
