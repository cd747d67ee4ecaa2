"""The weights of a group's ranks: whether they are equal, and can leave. Of the room of groups alone."""
