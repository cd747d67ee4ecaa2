"""What a model would need and do on devices, before it is loaded there. (iServe)

Way in: `estimate.estimate`, which is `elastic.estimate`. A composition root: sizes come from a model without weights on
the meta device (`model_layout`, `weight_pages`, `kv_room`, `work`), seconds from data sheets, or from fingerprints that
are measured here (`fingerprint`, `profile`). What is chosen among is pure: `elastic.planning.estimate`.
"""
