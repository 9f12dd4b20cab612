"""Ladders: for an operator ``X`` the file ``X.py`` registers teaching versions of it, each one idea further than the last.

The registry imports it with the operator. Ladders are read and timed (``weft bench X --ladder``), never called by the product.
"""
