"""How ranks come to be of a fleet: what starts them, whether they serve its model, and with which others they begin."""
