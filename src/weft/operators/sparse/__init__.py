"""Sparse matrices and their products: containers, products with vectors and with dense matrices."""

from weft.operators.sparse.csr import CSR

__all__ = ["CSR"]
