"""Modules over weft's operators, in place of those of ``torch.nn``; for Hugging Face's models see ``weft.nn.huggingface``."""

from weft.nn.grouped_query_attention import GroupedQueryAttention
from weft.nn.multihead_attention import MultiheadAttention
from weft.nn.scaled_dot_product_attention import scaled_dot_product_attention

__all__ = ["GroupedQueryAttention", "MultiheadAttention", "scaled_dot_product_attention"]
