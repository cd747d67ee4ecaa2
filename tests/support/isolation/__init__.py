"""What keeps one test from having others fail."""
