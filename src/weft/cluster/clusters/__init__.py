"""Formats of cluster files, one file each: a module with a ``CLUSTER``."""
