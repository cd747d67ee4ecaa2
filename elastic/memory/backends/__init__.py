"""Physical pages of one kind of device behind one contract of paired calls (`base.PageBackend`).

Way in: `memfd.MemfdBackend`, `cuda.CudaBackend`. Imported by `elastic.memory` alone, and by tests.
"""
