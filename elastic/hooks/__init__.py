"""What happens around a forward pass: the fixed hooks on a model, the gate of the safe point, inputs that travel.

Way in: `install.ModelHooks`, `forward_gate.ForwardGate`, `request_tracking.CacheRequestTracker`. Actions, the runtime
and engines import it; it imports `elastic.weights` and below.
"""
