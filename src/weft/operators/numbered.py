"""Another name of :class:`weft.operators.launch.Plan`."""

from weft.operators.launch import Plan as NumberedPlan

__all__ = ["NumberedPlan"]
