"""Orthogonalisation of matrices by Newton–Schulz iterations, and the symmetric products that they are made of."""
