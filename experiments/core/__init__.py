"""What every run of an experiment stands on: its engine, its record, its numbers."""
