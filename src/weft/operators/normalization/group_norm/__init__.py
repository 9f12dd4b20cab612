"""Group normalisation: statistics over a group of channels of each batch entry."""
