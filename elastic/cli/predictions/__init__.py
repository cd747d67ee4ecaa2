"""Sub-commands that predict, without a server: one file each, found by `main`.

Way in: `simulate.simulate`.
"""
