"""What a fleet keeps: its requests and how they are told, what has happened, and the memory of its ranks."""
