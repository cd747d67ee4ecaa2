"""A wrapped model as its user has it (`model.elastic`), and how it is put together.

Way in: `runtime.Runtime`, `runtime.runtime`. `elastic.wrap`, engines, the server, bench and the CLI import it; it
imports everything below.
"""
