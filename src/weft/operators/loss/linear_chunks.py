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


def aligned(c: LinearCall) -> LinearCall:
    """The call, or that of copies whose sizes along D and V are multiples of 8 and whose rows begin on 16 bytes, filled up with
    zeros: of other sizes in 16 bits cuBLAS falls to a quarter of its rate."""
    if c.aligned:
        return c
    d, v, bias = padded.up_to(c.x.shape[1]), padded.up_to(c.weight.shape[0]), c.bias
    x, weight = (
        t if tuple(t.shape) == shape and padded.fits(t) else padded.copied_to(t, *shape)
        for t, shape in ((c.x, (c.x.shape[0], d)), (c.weight, (v, d)))
    )
    if bias is not None and len(bias) != v:
        bias = padded.copied_to(bias[None], 1, v)[0]
    return dataclasses.replace(c, x=x, weight=weight, bias=bias, chunk_rows=c.rows)


class Classes:
    """The weight [V, D] as cuBLAS is fast with it: the first classes, of which 8 divides the number, and a copy of the others,
    with zeros after them. Logits have a column for each of those too."""

    def __init__(self, c: LinearCall):
        (v, d), self.bias, self.others = c.weight.shape, c.bias, None
        self.first = v if c.x.element_size() > 2 else v // 8 * 8
        self.columns, self.weight = v, c.weight
        if self.first < v:
            self.columns = self.first + 8
            self.weight, self.others = c.weight[: self.first], padded.copied_to(c.weight[self.first :], 8, d)
            if c.bias is not None:
                self.bias = padded.copied_to(c.bias[None], 1, self.columns)[0]

    def logits(self, x: Tensor, logits: Tensor) -> None:
        """x · weightᵀ (+ bias) into logits."""
        for weight, columns in ((self.weight, slice(self.first)), (self.others, slice(self.first, None))):
            if weight is None or not len(weight):
                continue
            if self.bias is None:
                torch.mm(x, weight.t(), out=logits[:, columns])
            else:
                torch.addmm(self.bias[columns], x, weight.t(), out=logits[:, columns])

    def gradient(self, dlogits: Tensor, dx: Tensor) -> None:
        """dlogits · weight into dx; what the others add is rounded before it is added to."""
        if self.others is None:
            torch.mm(dlogits, self.weight, out=dx)
            return
        torch.mm(dlogits[:, self.first :], self.others, out=dx)
        if self.first:
            dx.addmm_(dlogits[:, : self.first], self.weight)


def chunks(c: LinearCall) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits), all in one buffer whose rows begin on 16 bytes."""
    t, classes, most = c.x.shape[0], Classes(c), c.rows
    buffer = torch.empty((min(most, t), padded.up_to(classes.columns)), device=c.x.device, dtype=c.x.dtype)
    buffer = buffer[:, : classes.columns]
    for start in range(0, t, most):
        rows = slice(start, min(start + most, t))
        logits = buffer[: rows.stop - start]
        classes.logits(c.x[rows], logits)
        yield rows, logits


class Gradients:
    """dx, dweight and dbias, those that are wanted, summed from the chunks' gradients of logits; of the classes and columns
    ``of`` a weight, where that was copied."""

    def __init__(self, call: LinearCall, wanted: tuple[bool, ...], of: Tensor | None = None):
        x, weight, self.of = call.x, call.weight, call.weight if of is None else of
        self.call, self.classes, self.started = call, Classes(call), False
        dtype = call.accumulate
        if dtype is None:
            few = call.rows * FEW >= x.shape[0]
            dtype = weight.dtype if few else torch.float32
        rows = self.classes.columns
        self.dx = torch.empty(x.shape, device=x.device, dtype=x.dtype) if wanted[0] else None
        self.dweight = torch.empty((rows, weight.shape[1]), device=x.device, dtype=dtype) if wanted[1] else None
        self.dbias = torch.zeros(rows, device=x.device, dtype=torch.float32) if wanted[2] else None

    def add(self, rows: slice, dlogits: Tensor) -> None:
        if self.dx is not None:
            self.classes.gradient(dlogits, self.dx[rows])
        if self.dweight is not None:
            _add_product(self.dweight, dlogits.t(), self.call.x[rows], self.started)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)
        self.started = True

    def done(self) -> Three:
        dtype, (v, d) = self.call.x.dtype, self.of.shape
        dx, dweight, dbias = self.dx, self.dweight, self.dbias
        if dx is not None and dx.shape[1] != d:
            dx = padded.copied_to(dx, dx.shape[0], d)
        if dweight is not None:
            dweight = dweight.to(dtype)
            dweight = dweight[:v] if dweight.shape[1] == d else padded.copied_to(dweight, v, d)
        return dx, dweight, None if dbias is None else dbias[:v].to(dtype)


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
    """Cross entropy of chunks of logits: losses [T], and for one chunk at a time its gradient and its statistics.

    Kernels read an odd number of logits one by one. Where there are columns after the V classes (``aligned``) and neither a
    soft cap nor smoothing asks what they are, they are made -inf and read as well: they add nothing, and their gradient is 0.
    """

    def __init__(self, call: LinearCall):
        t, device, options = call.x.shape[0], call.x.device, call.options
        self.call, self.has_weight = call, call.class_weight is not None
        self.v, self.target = call.weight.shape[0], call.target
        alone = options.soft_cap or options.label_smoothing or call.x.element_size() > 2
        self.columns = self.v if alone else padded.up_to(self.v)
        if self.columns > self.v:  # a label of none of the classes stays one
            beyond = self.target >= self.v
            if options.ignore_index >= self.v:
                beyond &= self.target != options.ignore_index
            self.target = self.target.masked_fill(beyond, self.columns + (options.ignore_index == self.columns))
        self.losses = torch.empty(t, device=device, dtype=torch.float32)
        self.stats = torch.empty(2 * min(call.rows, t), device=device, dtype=torch.float32)
        sums = label_plans.of((call.target, call.w), call.weight.shape[0], call.options, self.has_weight)
        self.sums = sums(call.target, call.w) if sums else self.stats

    def forward(self, rows: slice, logits: Tensor, gradient: bool) -> None:
        """The losses and statistics; with ``gradient``, that is written over the logits, which may have columns after V."""
        if self.v < min(self.columns, logits.shape[1]):
            logits[:, self.v :] = -torch.inf
        logits, target, losses = logits[:, : self.columns], self.target[rows], self.losses[rows]
        of_class = logits if self.call.class_weight is None else self.call.class_weight
        plan = CHUNK.of((logits, target, of_class, losses), self.call.options, self.has_weight, gradient)
        plan(logits, target, of_class, self.sums, losses, self.stats, logits)

    def backward(self, rows: slice, logits: Tensor, dloss: Tensor, dlogits: Tensor) -> None:
        """Writes the gradient of logits, which may be those, from their statistics."""
        logits, dlogits = logits[:, : self.columns], dlogits[:, : self.columns]
        target, dloss = self.target[rows], dloss[rows] if dloss.ndim else dloss
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
    copies, of_rows = aligned(call), Rows(call)
    gradients = Gradients(copies, wanted, call.weight) if any(wanted) else None
    for rows, logits in chunks(copies):
        of_rows.forward(rows, logits, gradients is not None)
        if gradients is not None:
            gradients.add(rows, logits)
    return of_rows.loss(), (None, None, None) if gradients is None else gradients.done()


def gradients_of_losses(call: LinearCall, dloss: Tensor, wanted: tuple[bool, ...]) -> Three:
    """The gradients where the loss's, [] or [T], is known by now. Logits are made again, and their statistics with them:
    those of the loss are of logits that were never rounded, and a row that is sure of its label would have the
    difference for its gradient."""
    copies = aligned(call)
    of_rows, gradients = Rows(call), Gradients(copies, wanted, call.weight)
    for rows, logits in chunks(copies):
        of_rows.forward(rows, logits, False)
        of_rows.backward(rows, logits, dloss, logits)
        gradients.add(rows, logits)
    return gradients.done()


def loss_and_logits(call: LinearCall) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the logits of all tokens, one chunk, and their statistics. Unless the gradient of logits needs what is known in
    backward alone, it lies over them."""
    of_rows = Rows(call)
    ((rows, logits),) = chunks(aligned(call))
    of_rows.forward(rows, logits, not call.scaled_later)
    return of_rows.loss(), logits, of_rows.stats


def gradients_of_logits(
    call: LinearCall, logits: Tensor, stats: Tensor, dloss: Tensor, wanted: tuple[bool, ...], keep: bool
) -> Three:
    """The gradients from what :func:`loss_and_logits` returned; with ``keep`` the logits stay as they are."""
    v, rows = call.weight.shape[0], slice(len(logits))
    gradients = Gradients(aligned(call), wanted, call.weight)
    if call.scaled_later:
        of_rows, of_loss = Rows(call), logits
        of_rows.stats = stats
        if keep:
            of_loss = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
            of_loss[:, v:] = 0
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
