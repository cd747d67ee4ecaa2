"""What changes of precision cost in quality: replays under the weights that computed each token, and ROUGE-L.

Way in: `evaluate`. `benchmarks/` imports it.
"""
