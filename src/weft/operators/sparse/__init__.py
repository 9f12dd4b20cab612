"""Sparse matrices and their products: containers, products with vectors and with dense matrices."""

from weft.operators.sparse.bsr import BSR
from weft.operators.sparse.csr import CSR
from weft.operators.sparse.sell import SELL
from weft.operators.sparse.semi_structured import Sparse24

__all__ = ["BSR", "CSR", "SELL", "Sparse24"]
