"""Policies over snapshots: precision under pressure, replicas where there is room, an arbiter between them.

Way in: `precision.PrecisionPolicy`, `scaling.ScalingPolicy`, `arbiter.Arbiter`, `peer_group.PeerGroup`. All pure but
the group. The runtime imports it; it imports the snapshot, the sensors' constants and `elastic.planning`.
"""
