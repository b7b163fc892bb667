"""Can a trainer load it, and is every byte what was written?"""
