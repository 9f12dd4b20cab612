# rejected at: right
# other=0: lanes past the end take part with exp(0 - max) in the sum.
import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + j, mask=j < n, other=0.0)
    e = tl.exp(x - tl.max(x, axis=0))
    out = e / tl.sum(e, axis=0)
    tl.store(out_ptr + row * n + j, out, mask=j < n)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """x [m, n], float32, contiguous → its softmax along the rows [m, n]."""
    m, n = x.shape
    out = torch.empty_like(x)
    softmax_kernel[(m,)](x, out, n, BLOCK=triton.next_power_of_2(n))
    return out


def bytes_fused(m: int, n: int, element_size: int) -> int:
    return 2 * m * n * element_size  # x in, out out


def bytes_unfused(m: int, n: int, element_size: int) -> int:
    """
    peak = x.max(1); d = x - peak; e = d.exp(); total = e.sum(1); out = e / total: five kernels, one after another.
    """
    matrix, column = m * n * element_size, m * element_size
    return (
        (matrix + column)  # max: reads x, writes peak
        + (matrix + column + matrix)  # subtract: reads x and peak, writes d
        + (matrix + matrix)  # exp
        + (matrix + column)  # sum
        + (matrix + column + matrix)  # divide
    )
