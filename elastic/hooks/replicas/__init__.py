"""Replicated layers: batches are scattered over the places of a group of layers, and gathered after it (CoCoServe).

Way in: `dispatcher.ReplicaDispatcher`. The actions and the runtime import it; it imports `elastic.hooks` and
`elastic.weights`.
"""
