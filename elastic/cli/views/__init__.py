"""Terminal views and pictures: pure functions from statuses and profiles. The sub-commands import it."""
