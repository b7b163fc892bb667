"""What the Prefect UI shows."""
