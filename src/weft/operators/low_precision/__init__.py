"""Matrix products of operands with fewer than 16 bits."""
