"""Inputs of the commands: checked arguments, signals, and a model from its files. The commands import it."""
