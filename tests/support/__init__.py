"""What tests share: models, places, faults. No test is in here."""
