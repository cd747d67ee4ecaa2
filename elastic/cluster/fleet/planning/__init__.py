"""Pure decisions of a fleet: where a request goes, what should move, which prompt begins where, what fits."""
