"""The parts into which the feed-forward networks of decoder layers are cut: where they lie, and which are here."""
