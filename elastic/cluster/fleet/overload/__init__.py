"""Drops layers when requests find no KV, and restores them after it (KunServe, section 3: monitor and policy).

Way in: `controller.OverloadController`, and `prices.PricedVerbs`, of `Fleet`.
"""
