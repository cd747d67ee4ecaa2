"""Pages of devices and what is in them: ledgers, ranges of addresses, weight buffers, copies, the host store.

Way in: `places.open_place`, `pages`, `weight_buffer`, `host_store.host`.
Everything above may import it; it imports only the leaves (`errors`, `types`, `config`).
"""
