"""What a replay came to, in figures and pictures. Way in: `summary.summarize`, `compare`, `plots.draw`.

It imports `elastic.bench.replay`.
"""
