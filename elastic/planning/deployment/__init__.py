"""Which model goes to which devices. (iServe, section 6)

Way in: `placing.place`, of a model's `Option`s on `DeviceState`s, by one of three policies. Pure functions, without
torch: the simulator uses them as fleets do. What an option needs is counted by `elastic.estimation.options`.
"""
