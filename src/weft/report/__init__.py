"""Renders records, and measures nothing itself.

``render`` writes one self-contained HTML page; :mod:`weft.report.tables` keeps the measured tables of the docs.
"""

from weft.report.page import Contents, render

__all__ = ["Contents", "render"]
