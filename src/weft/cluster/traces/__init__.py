"""Trace formats, one file each: a module with a ``FORMAT``."""
