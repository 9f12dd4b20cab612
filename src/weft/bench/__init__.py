"""Verifies, compiles, times and tunes whatever the registry holds."""
