"""The hooks around a forward pass: a fixed set on a model, the gate of the safe point, copies to other devices.

Way in: `install.ModelHooks`, `forward_gate.ForwardGate`, `request_tracking.CacheRequestTracker`. Actions, the runtime
and engines import it; it imports `elastic.weights` and below.
"""
