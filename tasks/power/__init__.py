"""Is the hardware doing what it did when it was known good?"""
