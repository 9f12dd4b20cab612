"""Linear cross entropy with its gradients, some tokens at a time: three products, and the logits of one chunk in memory.

For each chunk of C tokens: logits [C, V] = x · weightᵀ (+ bias) by the vendor's product into one buffer that all chunks use;
cross entropy's own kernel writes the gradient over them; dx = dlogits · weight, and dweight += dlogitsᵀ · x. What a
chunk adds to dweight is summed in fp32 inside the product, but dweight is rounded once for each chunk: docs/notes/loss.md
counts what that costs, and why there are few chunks.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.operators.launch import Plans
from weft.operators.loss.dispatch import BACKWARD, CHUNK, LinearCall, label_sums
from weft.operators.loss.kernels import Sum

CHUNK_BYTES = 2**30  # of logits that lie in memory at once
WHOLE = 128  # rows of a tile of a product: chunks are multiples of it, and never fewer
FEW = 4  # chunks up to which a 16-bit dweight is summed in its own dtype; its error is then 1.4 times one rounding's


Three = tuple[Tensor | None, Tensor | None, Tensor | None]  # by x, the weight and the bias


def chunk_rows(t: int, v: int, element_size: int, asked: int | None = None) -> int:
    """How many of ``t`` tokens have their logits in memory at once: equal chunks of whole tiles within CHUNK_BYTES."""
    if asked is not None:
        return max(min(asked, t), 1)
    most = max(CHUNK_BYTES // (max(v, 1) * element_size) // WHOLE * WHOLE, WHOLE)
    if t <= most:
        return max(t, 1)
    chunks = -(-t // most)
    return min(-(-t // chunks // WHOLE) * WHOLE, most)


def rows_of_chunk(c: LinearCall) -> int:
    return chunk_rows(c.x.shape[0], c.weight.shape[0], c.x.element_size(), c.chunk_rows)


def chunks(c: LinearCall) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits), all in one buffer whose rows begin on 16 bytes: a vocabulary of 50,257 has cuBLAS fall to a quarter
    of its rate in products with rows that do not."""
    t, v, most = c.x.shape[0], c.weight.shape[0], rows_of_chunk(c)
    step = 16 // c.x.element_size()
    buffer = torch.empty((min(most, t), -(-v // step) * step), device=c.x.device, dtype=c.x.dtype)[:, :v]
    columns = c.weight.t()
    for start in range(0, t, most):
        rows = slice(start, min(start + most, t))
        logits = buffer[: rows.stop - start]
        if c.bias is None:
            torch.mm(c.x[rows], columns, out=logits)
        else:
            torch.addmm(c.bias, c.x[rows], columns, out=logits)
        yield rows, logits


class Gradients:
    """dx, dweight and dbias, those that are wanted, summed from the chunks' gradients of logits."""

    def __init__(self, call: LinearCall, wanted: tuple[bool, ...]):
        x, weight = call.x, call.weight
        self.call, self.started = call, False
        dtype = call.accumulate
        if dtype is None:
            few = rows_of_chunk(call) * FEW >= x.shape[0]
            dtype = weight.dtype if few else torch.float32
        self.dx = torch.empty(x.shape, device=x.device, dtype=x.dtype) if wanted[0] else None
        self.dweight = torch.empty(weight.shape, device=x.device, dtype=dtype) if wanted[1] else None
        self.dbias = torch.zeros(weight.shape[0], device=x.device, dtype=torch.float32) if wanted[2] else None

    def add(self, rows: slice, dlogits: Tensor) -> None:
        if self.dx is not None:
            torch.mm(dlogits, self.call.weight, out=self.dx[rows])
        if self.dweight is not None:
            _add_product(self.dweight, dlogits.t(), self.call.x[rows], self.started)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)
        self.started = True

    def done(self) -> Three:
        dtype = self.call.x.dtype
        dweight = None if self.dweight is None else self.dweight.to(dtype)
        return self.dx, dweight, None if self.dbias is None else self.dbias.to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, started: bool) -> None:
    """total (+)= a · b, rounded once to total's dtype."""
    if total.dtype == a.dtype:
        if started:
            total.addmm_(a, b)
        else:
            torch.mm(a, b, out=total)
    elif a.is_cpu:  # PyTorch has the mixed product on GPUs only
        torch.mm(a.float(), b.float(), out=total) if not started else total.addmm_(a.float(), b.float())
    elif started:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        torch.mm(a, b, out_dtype=total.dtype, out=total)


class Rows:
    """Cross entropy of chunks of logits: losses [T], and for one chunk at a time its gradient and its statistics."""

    def __init__(self, call: LinearCall):
        t, device = call.x.shape[0], call.x.device
        self.call, self.has_weight = call, call.class_weight is not None
        self.losses = torch.empty(t, device=device, dtype=torch.float32)
        self.stats = torch.empty(2 * min(rows_of_chunk(call), t), device=device, dtype=torch.float32)
        sums = label_plans.of((call.target, call.w), call.weight.shape[0], call.options, self.has_weight)
        self.sums = sums(call.target, call.w) if sums else self.stats

    def forward(self, rows: slice, logits: Tensor, gradient: bool) -> None:
        """The losses and statistics; with ``gradient``, that is written over the logits."""
        target, losses = self.call.target[rows], self.losses[rows]
        of_class = logits if self.call.class_weight is None else self.call.class_weight
        plan = CHUNK.of((logits, target, of_class, losses), self.call.options, self.has_weight, gradient)
        plan(logits, target, of_class, self.sums, losses, self.stats, logits)

    def backward(self, rows: slice, logits: Tensor, dloss: Tensor) -> None:
        """Writes the gradient over the logits, from their statistics."""
        target, dloss = self.call.target[rows], dloss[rows] if dloss.ndim else dloss
        of_class = logits if self.call.class_weight is None else self.call.class_weight
        tensors = logits, target, of_class, dloss, logits
        plan = BACKWARD.kernel("triton").of(tensors, self.call.options, self.has_weight)
        plan(logits, target, of_class, self.sums, self.stats, dloss, logits)


def loss_and_gradients(call: LinearCall, wanted: tuple[bool, ...]) -> tuple[Tensor, Three]:
    """The loss, and the gradients of the loss (or of the losses' sum) that are wanted."""
    of_rows = Rows(call)
    gradients = Gradients(call, wanted) if any(wanted) else None
    for rows, logits in chunks(call):
        of_rows.forward(rows, logits, gradients is not None)
        if gradients is not None:
            gradients.add(rows, logits)
    loss = of_rows.losses
    if call.options.reduction != "none":
        loss = torch.empty((), device=call.x.device, dtype=torch.float32)
        total_plans.of((of_rows.losses, loss))(of_rows.losses, loss)
    return loss, (None, None, None) if gradients is None else gradients.done()


def gradients_of_losses(call: LinearCall, dloss: Tensor, wanted: tuple[bool, ...]) -> Three:
    """The gradients where the loss's, [] or [T], is known by now. Logits are made again, and their statistics with them:
    those of the loss are of logits that were never rounded, and a row that is sure of its label would have the
    difference for its gradient."""
    of_rows, gradients = Rows(call), Gradients(call, wanted)
    for rows, logits in chunks(call):
        of_rows.forward(rows, logits, False)
        of_rows.backward(rows, logits, dloss)
        gradients.add(rows, logits)
    return gradients.done()


label_plans = Plans(label_sums)
total_plans = Plans(lambda losses, loss: Sum(losses.shape[0]))
