"""Python imports this when it starts, where this folder is in PYTHONPATH: in children of the tests."""

import poison

poison.install()
