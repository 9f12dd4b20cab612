"""The one kernel of the rotary embedding, and when PyTorch is called instead."""

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.operators.checks import check_device, check_flag, check_places, check_same, check_shape, check_tensor
from weft.operators.dispatch import EMPTY, ON_CPU, Call, Dispatch, Route
from weft.operators.rotary.kernels import launch


@dataclass
class RotationCall(Call):
    """q [B, S, H, D] and k [B, S, G, D] rotated by the angles of cos and sin, of which ``narrowed`` makes [S, R/2] or [B, S,
    R/2], or with ``conjugate`` by the negative angles, which is the gradient."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    inplace: bool = False
    conjugate: bool = False

    def __post_init__(self) -> None:
        self.x, name = self.q, "rotary_embedding"
        q, k, cos, sin = self.q, self.k, self.cos, self.sin
        check_tensor(name, "q", q)
        check_tensor(name, "k", k)
        check_same(name, "k", k, "q", q)
        for argument, x in (("q", q), ("k", k)):
            check_shape(name, argument, x, x.ndim == 4, "[B, S, heads, D]")
        b, s, _, d = q.shape
        like_q = (k.shape[0], k.shape[1], k.shape[3]) == (b, s, d)
        if not like_q:
            check_shape(name, "k", k, like_q, f"the same batch, sequence and head dim as 'q', {tuple(q.shape)}")
        for argument, flag in (("interleaved", self.interleaved), ("inplace", self.inplace)):
            check_flag(name, argument, flag)
        for argument, table in (("cos", cos), ("sin", sin)):
            check_tensor(name, argument, table, tuple(dict.fromkeys((q.dtype, torch.float32))))
            check_device(name, argument, table, "q", q)
            width = cos.shape[-1] if cos.ndim else 0
            # sizes one by one: a compiler's may be symbols
            fits = table.ndim in (2, 3) and table.ndim == cos.ndim
            fits = fits and table.shape[-1] == width and table.shape[-2] == s
            fits = fits and (table.ndim == 2 or (table.shape[0] == cos.shape[0] and table.shape[0] in (1, b)))
            fits &= 0 < 2 * width <= d or (width <= d and width % 2 == 0 and not self.interleaved)
            if not fits:  # only then is a text made of sizes: they would be constants for a compiler
                sizes = f"B = {b} or 1, S = {s} and 2 <= R <= {d}"
                repeated = (
                    "; or R columns in two equal halves, an even R > D/2, where interleaved=False says which repeat"
                )
                expected = f"[S, R/2] or [B, S, R/2], both tables alike, with {sizes}{repeated}"
                check_shape(name, argument, table, fits, expected)
        check_same(name, "sin", sin, "cos", cos)
        self.cos, self.sin = (narrowed(table, d) for table in (cos, sin))
        if self.inplace:
            check_places(name, "q", q, "inplace=True")
            check_places(name, "k", k, "inplace=True")

    @property
    def empty(self) -> bool:
        return not (self.q.numel() or self.k.numel())

    @property
    def tables_need_gradients(self) -> bool:
        return torch.is_grad_enabled() and (self.cos.requires_grad or self.sin.requires_grad)


def narrowed(table: Tensor, d: int) -> Tensor:
    """[S, R/2] or [B, S, R/2] of a table of one row for all of the batch, [1, S, …], or as wide as R, too wide for half of a
    head: of Hugging Face's ``cat((freqs, freqs), -1)`` the first half."""
    table = table[0] if table.ndim == 3 and table.shape[0] == 1 else table
    return table[..., : table.shape[-1] // 2] if 2 * table.shape[-1] > d else table


TRITON = Route("triton", lambda c: True, "q and k in one launch, read in place whatever their strides", launch)

FORWARD = Dispatch(
    RotationCall, ON_CPU, EMPTY,
    Route("torch", lambda c: c.traced and c.inplace, "traced, and in place: a compiler plans memory itself"),
    Route("torch", lambda c: c.tables_need_gradients,
          "cos or sin needs a gradient, for which there is no kernel of ours"),
    Route("triton", lambda c: c.traced, "traced: one operator for the compiler, whose own kernels take longer", launch),
    TRITON,
)  # fmt: skip
BACKWARD = Dispatch(RotationCall, TRITON)
