"""Running sums and products along one axis."""
