"""The memory of ranks as others read it: its server, its readers, and the ways by which bytes go.

Way in: `server.MemoryServer` and `reader.OtherMemories`, of which `peers.hub.PeerHub` has one each.
"""
