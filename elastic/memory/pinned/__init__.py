"""Page-locked host memory: what a GPU copies from and to by itself, while the host goes on.

Way in: `page_lock.page_lock`, `staging_ring.StagingRing`. Imported by the files of `memory` only.
"""
