"""What happened, for a person."""
