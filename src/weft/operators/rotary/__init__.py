"""Rotary position embedding of queries and keys."""
