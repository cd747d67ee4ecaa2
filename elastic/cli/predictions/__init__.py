"""Commands that say what would be, and start nothing."""
