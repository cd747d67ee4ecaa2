"""Models and choices for tests of how weights lie in pages."""
