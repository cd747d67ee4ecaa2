"""What terminals and pictures show: pure functions from statuses and profiles. The sub-commands import it."""
