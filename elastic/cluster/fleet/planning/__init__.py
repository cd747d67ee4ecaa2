"""Pure decisions of a fleet: where a request goes, what should move, and which prompt begins where."""
