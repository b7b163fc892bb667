"""Which samples teach the drafter nothing, and why?"""
