"""What the commands take: checked arguments, signals, and a model from its files. The commands import it."""
