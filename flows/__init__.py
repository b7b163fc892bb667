"""The missions: flows, the run's one description, and the command line."""
