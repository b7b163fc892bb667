"""Exports: a run's rows in the form that each trainer reads."""
