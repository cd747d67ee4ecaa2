"""Parts of layers that leave and return by themselves, in the block that the others lie in."""
