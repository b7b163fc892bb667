"""One room a stage, and what the rooms share."""
