"""The command `elastic`: one file for each sub-command. Way in: `main.main`. Nothing imports it."""
