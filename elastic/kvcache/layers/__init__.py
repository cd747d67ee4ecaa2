"""Cache layers of transformers over leased memory: full attention, sliding windows, rows split over places.

Way in: `elastic_layer.ElasticLayer`. `elastic.kvcache` and the KV actions import it; it imports
`elastic.kvcache.storage`.
"""
