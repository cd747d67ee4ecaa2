"""The cost in quality of changes of precision: replays under the weights that computed each token, and ROUGE-L.

Way in: `evaluate.QualityReplayer`. `evaluation_quality.py` imports it.
"""
