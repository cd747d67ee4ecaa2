"""How the papers lay out weights, to compare with."""
