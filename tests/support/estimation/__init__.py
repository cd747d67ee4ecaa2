"""What the papers do with measurements, to compare with."""
