"""Modules over weft's operators, in place of those of ``torch.nn``; for Hugging Face's models see ``weft.patch``."""

from weft.nn.embedding import Embedding
from weft.nn.feed_forward import MixtureOfExperts, SwiGLU
from weft.nn.grouped_query_attention import GroupedQueryAttention
from weft.nn.key_value_cache import KeyValueCache
from weft.nn.linear import Linear
from weft.nn.linear_cross_entropy import LinearCrossEntropy
from weft.nn.multihead_attention import MultiheadAttention
from weft.nn.norms import LayerNorm, RMSNorm
from weft.nn.scaled_dot_product_attention import scaled_dot_product_attention
from weft.nn.transformer_layer import TransformerLayer

__all__ = [
    "Embedding",
    "GroupedQueryAttention",
    "KeyValueCache",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "MixtureOfExperts",
    "MultiheadAttention",
    "RMSNorm",
    "SwiGLU",
    "TransformerLayer",
    "scaled_dot_product_attention",
]
