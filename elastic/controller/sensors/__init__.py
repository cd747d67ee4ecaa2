"""Sensors for snapshots: requests, host memory, GPUs.

Way in: `monitor.Monitor`, `request_metrics.RequestMetrics`. The runtime and engines import it; it imports the snapshot.
"""
