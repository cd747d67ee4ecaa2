"""Figures and pictures of replays. Way in: `summary.summarize`, `compare`, `plots.draw`.

It imports `elastic.bench.replay`.
"""
