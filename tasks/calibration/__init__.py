"""How many requests in flight give the most tokens, and when will the run end?"""
