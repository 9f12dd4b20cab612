# rejected at: right
# The result is float16, half the bytes of float32.
import torch
import triton
import triton.language as tl


@triton.jit
def linear_relu_kernel(a_ptr, b_ptr, bias_ptr, c_ptr, n, k, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    rows = tl.program_id(0) * TM + tl.arange(0, TM)[:, None]  # [TM, 1]
    cols = tl.program_id(1) * TN + tl.arange(0, TN)[None, :]  # [1, TN]
    acc = tl.zeros([TM, TN], tl.float32)
    for start in range(0, k, TK):
        inner = start + tl.arange(0, TK)
        a = tl.load(a_ptr + rows * k + inner[None, :])  # [TM, TK] float16
        b = tl.load(b_ptr + inner[:, None] * n + cols)  # [TK, TN] float16
        acc = tl.dot(a, b, acc)
    bias = tl.load(bias_ptr + cols).to(tl.float32)  # [1, TN]
    out = tl.maximum(acc + bias, 0.0)
    tl.store(c_ptr + rows * n + cols, out)


def linear_relu(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, tm: int = 32, tn: int = 32, tk: int = 32
) -> torch.Tensor:
    """a [m, k], b [k, n], bias [n], float16, contiguous → relu(a b + bias) [m, n], float16."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float32, device=a.device)
    linear_relu_kernel[(m // tm, n // tn)](a, b, bias, c, n, k, TM=tm, TN=tn, TK=tk)
    return c
