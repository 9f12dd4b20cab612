"""Synthetic traces: jobs drawn from stated numbers, or from a profile that was fitted to a real trace."""
