"""The control loop: it looks, asks a policy, and has the answer done.

Way in: `loop.Controller`, `snapshot.Snapshot` (what a policy sees), `decision.Plan` (what it answers). The runtime,
engines, the server and `elastic bench` import it; it imports `elastic.planning` and the leaves.
"""
