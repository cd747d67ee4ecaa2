"""Physical pages of one place: the ledger, ranges of addresses that show them, what torch sees of these, the janitor.

Way in: `page_pool.PagePool`, `virtual_range.VirtualRange`, `background.janitor`, `finalizers.call_at_death`. Everything
above may import it; it imports `backends`.
"""
