"""``weft cost``: GPU hours that were allocated, used and idle, and money, by team, user and job; what they were good for."""
