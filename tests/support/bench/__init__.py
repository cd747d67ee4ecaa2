"""What replays leave behind."""
