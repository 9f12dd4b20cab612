"""Linear cross entropy with its gradients, some tokens at a time: three products, and the logits of one chunk in memory.

For each chunk of C tokens: logits [C, V] = x · weightᵀ (+ bias) by the vendor's product into one buffer that all chunks use;
cross entropy's own kernel writes the gradient over them; dx = dlogits · weight, and dweight += dlogitsᵀ · x. What a
chunk adds to dweight is summed in fp32 inside the product, but dweight is rounded once for each chunk: docs/notes/loss.md
counts what that costs, and why there are few chunks.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from weft.operators.hopper import padded
from weft.operators.launch import Plans
from weft.operators.loss.dispatch import BACKWARD, CHUNK, LinearCall, label_sums
from weft.operators.loss.kernels import Sum, scale_plans

FEW = 4  # chunks up to which a 16-bit dweight is summed in its own dtype; its error is then 1.4 times one rounding's


Three = tuple[Tensor | None, Tensor | None, Tensor | None]  # by x, the weight and the bias


def with_aligned_rows(c: LinearCall) -> LinearCall:
    """The call, or that of copies of x and the weight whose rows begin on 16 bytes and end with zeros: cuBLAS falls to a
    quarter of its rate with others."""
    if c.aligned:
        return c
    d = padded.up_to(c.x.shape[1])
    x, weight = (
        t if t.shape[1] == d and padded.fits(t) else padded.copied_to(t, t.shape[0], d) for t in (c.x, c.weight)
    )
    return dataclasses.replace(c, x=x, weight=weight)


def chunks(c: LinearCall) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits), all in one buffer whose rows begin on 16 bytes: a vocabulary of 50,257 has cuBLAS fall to a quarter
    of its rate in products with rows that do not."""
    t, v, most = c.x.shape[0], c.weight.shape[0], c.rows
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
    """dx, dweight and dbias, those that are wanted, summed from the chunks' gradients of logits; of the first ``columns`` of x
    and the weight."""

    def __init__(self, call: LinearCall, wanted: tuple[bool, ...], columns: int | None = None):
        x, weight, self.columns = call.x, call.weight, columns
        self.call, self.started = call, False
        dtype = call.accumulate
        if dtype is None:
            few = call.rows * FEW >= x.shape[0]
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
        dtype, columns = self.call.x.dtype, slice(self.columns)
        dx = None if self.dx is None else self.dx[:, columns].contiguous()
        dweight = None if self.dweight is None else self.dweight[:, columns].to(dtype).contiguous()
        return dx, dweight, None if self.dbias is None else self.dbias.to(dtype)


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
        self.stats = torch.empty(2 * min(call.rows, t), device=device, dtype=torch.float32)
        sums = label_plans.of((call.target, call.w), call.weight.shape[0], call.options, self.has_weight)
        self.sums = sums(call.target, call.w) if sums else self.stats

    def forward(self, rows: slice, logits: Tensor, gradient: bool) -> None:
        """The losses and statistics; with ``gradient``, that is written over the logits."""
        target, losses = self.call.target[rows], self.losses[rows]
        of_class = logits if self.call.class_weight is None else self.call.class_weight
        plan = CHUNK.of((logits, target, of_class, losses), self.call.options, self.has_weight, gradient)
        plan(logits, target, of_class, self.sums, losses, self.stats, logits)

    def backward(self, rows: slice, logits: Tensor, dloss: Tensor, dlogits: Tensor) -> None:
        """Writes the gradient of logits, which may be those, from their statistics."""
        target, dloss = self.call.target[rows], dloss[rows] if dloss.ndim else dloss
        of_class = logits if self.call.class_weight is None else self.call.class_weight
        plan = BACKWARD.of((logits, target, of_class, dloss, dlogits), self.call.options, self.has_weight)
        plan(logits, target, of_class, self.sums, self.stats, dloss, dlogits)

    def loss(self) -> Tensor:
        """The losses, or their sum."""
        if self.call.options.reduction == "none":
            return self.losses
        loss = torch.empty((), device=self.losses.device, dtype=torch.float32)
        total_plans.of((self.losses, loss))(self.losses, loss)
        return loss


def loss_and_gradients(call: LinearCall, wanted: tuple[bool, ...]) -> tuple[Tensor, Three]:
    """The loss, and the gradients of the loss (or of the losses' sum) that are wanted."""
    columns, call = call.x.shape[1], with_aligned_rows(call)
    of_rows = Rows(call)
    gradients = Gradients(call, wanted, columns) if any(wanted) else None
    for rows, logits in chunks(call):
        of_rows.forward(rows, logits, gradients is not None)
        if gradients is not None:
            gradients.add(rows, logits)
    return of_rows.loss(), (None, None, None) if gradients is None else gradients.done()


def gradients_of_losses(call: LinearCall, dloss: Tensor, wanted: tuple[bool, ...]) -> Three:
    """The gradients where the loss's, [] or [T], is known by now. Logits are made again, and their statistics with them:
    those of the loss are of logits that were never rounded, and a row that is sure of its label would have the
    difference for its gradient."""
    columns, call = call.x.shape[1], with_aligned_rows(call)
    of_rows, gradients = Rows(call), Gradients(call, wanted, columns)
    for rows, logits in chunks(call):
        of_rows.forward(rows, logits, False)
        of_rows.backward(rows, logits, dloss, logits)
        gradients.add(rows, logits)
    return gradients.done()


def loss_and_logits(call: LinearCall) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the logits of all tokens, one chunk, and their statistics. Unless the gradient of logits needs what is known in
    backward alone, it lies over them."""
    call = with_aligned_rows(call)
    of_rows = Rows(call)
    ((rows, logits),) = chunks(call)
    of_rows.forward(rows, logits, not call.scaled_later)
    return of_rows.loss(), logits, of_rows.stats


def gradients_of_logits(
    call: LinearCall, logits: Tensor, stats: Tensor, dloss: Tensor, wanted: tuple[bool, ...], keep: bool
) -> Three:
    """The gradients from what :func:`loss_and_logits` returned; with ``keep`` the logits stay as they are."""
    columns, call, rows = call.x.shape[1], with_aligned_rows(call), slice(len(logits))
    gradients = Gradients(call, wanted, columns)
    if call.scaled_later:
        of_rows, of_loss = Rows(call), logits
        of_rows.stats = stats
        if keep:
            of_loss = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
        of_rows.backward(rows, logits, dloss, of_loss)
        gradients.add(rows, of_loss)
        return gradients.done()
    gradients.add(rows, logits)
    return scaled(gradients.done(), dloss)


def scaled(gradients: Three, dloss: Tensor) -> Three:
    """In place; nothing is touched where the loss's gradient is 1."""
    for gradient in gradients:
        if gradient is not None:
            scale_plans.of((gradient,), dloss.dtype)(dloss, gradient)
    return gradients


label_plans = Plans(label_sums)
total_plans = Plans(lambda losses, loss: Sum(losses.shape[0]))
