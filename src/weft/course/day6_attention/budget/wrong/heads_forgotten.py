# rejected at: predict
# Each head has scores of its own.
def flops(B: int, H: int, S: int, T: int, D: int) -> int:
    """
    The two matrix products, q kᵀ and p v; the softmax between them is not counted.
    """
    return 4 * B * H * S * T * D


def scores_bytes(B: int, H: int, S: int, T: int) -> int:
    """
    Memory that the matrix of scores takes, in float32.
    """
    return 4 * B * S * T


def bytes_standard(B: int, H: int, S: int, T: int, D: int, size: int) -> int:
    """
    Three kernels: q kᵀ writes scores; softmax reads scores and writes p, of `size` bytes; p v reads p and writes the output.

    Each kernel reads its inputs once and writes its output once.
    """
    head = (S * D + T * D) * size + S * T * 4  # q, k in; scores out
    head += S * T * 4 + S * T * size  # scores in; p out
    head += (S * T + T * D + S * D) * size  # p, v in; output out
    return B * H * head


def bytes_fused(B: int, H: int, S: int, T: int, D: int, size: int) -> int:
    """
    One kernel that reads q, k and v once and writes the output once.
    """
    return B * H * 2 * (S * D + T * D) * size


def causal_share(S: int) -> float:
    """
    The part of all S x S scores that causal attention needs: query i sees the keys 0 … i.
    """
    return (S + 1) / (2 * S)
