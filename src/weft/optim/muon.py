"""``Muon``: momentum orthogonalized by Newton–Schulz iterations, and AdamW for other parameters.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): B ← μ·B + (1 − μ)·G; the update is the orthogonal polar
factor of (1 − μ)·G + μ·B (Nesterov) or of B, times a factor for the matrix's shape. Weights decay beside it, as with
AdamW: W ← W − lr · λ · W. Arguments and state are named as ``torch.optim.Muon``'s, whose state dicts they exchange.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.operators.optimizer.rules import ADAM
from weft.operators.orthogonalization.coefficients import CLASSIC, Coefficients, schedule
from weft.optim import state
from weft.optim.adam import AdamW
from weft.optim.muon_sharding import Layout, Shard, Work, cost, layout_of, share_work, work_on_whole
from weft.optim.options import check_betas, check_flags, each_once
from weft.optim.state import local

SCALES = (None, "original", "match_rms_adamw")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HIGHER_DIMS = ("flatten", "batch")
STACKED = 2**28  # elements of a batched call, at most: 1 GiB of fp32 beside the parameters


class Muon(torch.optim.Optimizer):
    """Muon with decoupled weight decay: arguments, defaults and step of ``torch.optim.Muon``. ``MuonW`` is the same class.

    Args:
        params: parameters, or groups (dicts) of them with options of their own. Parameters of two dimensions and more are
            matrices; the others, and all of a group with ``use_muon=False`` (embeddings, output layers), take AdamW.
        lr: learning rate, at least 0, of both algorithms; a number or a tensor of one element. Give groups their own where
            AdamW needs another.
        weight_decay: λ, at least 0, of both algorithms.
        momentum: μ, 0 … 1.
        nesterov: Nesterov's momentum.
        ns_coefficients: ``classic``, ``polar-express``, or three numbers.
        eps: the least norm that a momentum is divided by.
        ns_steps: Newton–Schulz steps, 1 … 99.
        adjust_lr_fn: the update's factor: ``original`` (also None) for √max(1, rows / columns), ``match_rms_adamw`` for
            0.2 · √max(rows, columns), with which AdamW's learning rate and decay serve for Muon too.
        update_rms: instead of such a factor, scale every matrix's update to this root mean square; or None.
        split_rows: cut each matrix of a group by rows, into so many equal parts or parts of these sizes, that are
            orthogonalized on their own: 3, or (4096, 1024, 1024), for a fused projection of queries, keys and values.
        higher_dims: of parameters with more than two dimensions: ``flatten`` to [M, rest], as convolutions want, or ``batch``
            for matrices [..., M, N], as stacked experts are.
        use_muon: of a group: None for matrices only, True (all parameters must be matrices), or False for AdamW.
        ns_dtype: that the iteration is computed in: bfloat16, float16 or float32.
        adamw_betas, adamw_eps: AdamW's; not named ``betas``, which learning rate schedules with a cycle of momentum would take.
        process_group: processes that have the same parameters and gradients (DDP): each orthogonalizes its share of the
            matrices, and the results are all-gathered. None: every process does all of it.
        skip_nonfinite: a step with a gradient that is not finite changes nothing but ``skipped_steps``, on all processes of
            the group or the meshes. Waits for the device.

    DTensors (FSDP2, tensor parallelism) need no ``process_group``: along mesh dimensions that they are sharded on, each process
    takes its share of the parameters whole, orthogonalizes them and sends every process its shard of the update; replicas share
    the matrices. All processes must have gradients for the same parameters.

    Raises:
        ValueError: options out of their ranges; a parameter that is there twice; parts that are not a parameter's rows; at a
            step, a momentum of another shape than its gradient.
        RuntimeError: at a step, complex parameters, sparse gradients, gradients placed otherwise than their parameter.
        NotImplementedError: at a step, DTensors placed otherwise than as shards (of ``torch.chunk``) and replicas.

    Momentum is ``state[p]["momentum_buffer"]``, of the gradient's dtype and placements.
    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the iteration is ``weft.ops.newton_schulz``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = CLASSIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        update_rms: float | None = None,
        split_rows: int | Sequence[int] | None = None,
        higher_dims: str = "flatten",
        use_muon: bool | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        process_group: Any = None,
        skip_nonfinite: bool = False,
    ):
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "update_rms": update_rms,
            "split_rows": split_rows,
            "higher_dims": higher_dims,
            "use_muon": use_muon,
            "ns_dtype": ns_dtype,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
        }
        check_flags({"skip_nonfinite": skip_nonfinite})
        self.process_group, self.skip_nonfinite, self.skipped_steps = process_group, skip_nonfinite, 0
        self._adamw: AdamW | None = None
        super().__init__(params, defaults)
        self.state = state.States(self.state, state.Changes())  # AdamW's part records changes in it

    # ---- groups and state --------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; options that it does not say are the optimizer's."""
        param_group = each_once(param_group)
        if "betas" in param_group:
            raise ValueError("a group has the option 'betas'; expected 'adamw_betas'")
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._adamw = None

    def _check(self, group: dict[str, Any]) -> None:
        check_muon_options(group)
        if group["ns_coefficients"] == "classic":
            group["ns_coefficients"] = CLASSIC  # as torch.optim.Muon's state dicts have it
        for p in group["params"]:
            if group["use_muon"] and p.ndim < 2:
                raise ValueError(
                    f"use_muon is True for a parameter of shape {tuple(p.shape)}; expected matrices (two dimensions or more)"
                )
            if is_matrix(p, group) and group["split_rows"] is not None:
                batch = group["higher_dims"] == "batch"
                rows_of_parts(p.shape[-2] if batch else p.shape[0], group["split_rows"])

    def state_dict(self) -> dict[str, Any]:
        """As PyTorch's; of Muon's parameters that of ``torch.optim.Muon``, of the others that of ``torch.optim.AdamW``."""
        return state.export(super().state_dict(), [] if self._adamw is None else self._adamw._parts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of ``torch.optim.Muon``; options that it does not have are left unchanged.

        Raises:
            ValueError: other numbers of parameters; options out of their ranges; a state that lacks something (other than all),
                or one of another shape or dtype than it should be. Nothing is loaded then.
        """

        def prepare(given: dict[str, Any]) -> dict[str, Any]:
            if len(given["param_groups"]) != len(self.param_groups):
                return given  # which PyTorch refuses
            saved = [{"adamw_betas" if name == "betas" else name: value for name, value in group.items()}
                     for group in given["param_groups"]]  # fmt: skip
            groups = [{**mine, **theirs} for mine, theirs in zip(self.param_groups, saved, strict=True)]
            for group in groups:
                self._check({**group, "params": []})
            options = [group for group in groups for _ in group["params"]]
            pairs = state.pairs_of(self, given)
            state.check(pairs, [names_of_state(p, group) for (_, p), group in zip(pairs, options, strict=False)])
            return {**given, "param_groups": groups}

        state.load(self, state_dict, prepare)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "skip_nonfinite": self.skip_nonfinite,
            "skipped_steps": self.skipped_steps,
        }

    def __setstate__(self, given: dict[str, Any]) -> None:
        self.process_group = getattr(self, "process_group", None)  # processes are not pickled
        self._adamw = None
        super().__setstate__(given)
        self.state = state.States(self.state, state.Changes())

    # ---- the step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step from the gradients as they are; ``closure`` computes them again and returns the loss, which is returned."""
        if torch.compiler.is_dynamo_compiling():
            return _untraced_step(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if is_matrix(p, group):
                    check_gradient(p)
        if self.skip_nonfinite and not self._finite():
            self.skipped_steps += 1
            return loss
        for group in self.param_groups:
            self._muon(group)
        self._others()
        return loss

    def _finite(self) -> bool:
        """Whether all gradients are, on all processes that step together."""
        params = [p for group in self.param_groups for p in group["params"]]
        if not params:
            return True
        sharded = [p for p in params if hasattr(p, "device_mesh")]
        meshes = dict.fromkeys(p.device_mesh for p in sharded)
        together = [mesh.get_group(i) for mesh in meshes for i in range(mesh.ndim) if mesh.size(i) > 1]
        if self.process_group is not None:
            together.append(self.process_group)
        bad = torch.zeros((), dtype=torch.float32, device=local((sharded or params)[0]).device)
        grads: dict[torch.device, list[Tensor]] = {}
        for g in (local(p.grad) for p in params if p.grad is not None):
            if g.numel() and g.layout == torch.strided:  # what AdamW refuses is left to it
                grads.setdefault(g.device, []).append(g)
        for those in grads.values():
            largest = torch.stack(
                [x.double() for x in torch._foreach_norm(those, torch.inf)]
            )  # NaN, where there is one
            bad += (~largest.isfinite()).any().to(bad.device)
        for processes in together:
            torch.distributed.all_reduce(bad, group=processes)
        return not float(bad)

    def _muon(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None and p.numel() and is_matrix(p, group)]
        if not params:
            return
        updates = updates_of(params, self._momenta(params, group), group, self.process_group)
        lr, decay, weights = float(group["lr"]), group["weight_decay"], [local(p) for p in params]
        if decay and all(w.is_cuda for w in weights):
            torch._foreach_mul_(weights, 1 - lr * decay)
        elif decay:
            for w in weights:  # on a CPU the former would round the factor to bf16: 0.998 to 0.996
                w.mul_(1 - lr * decay)
        factors = factors_by_shape(params, group)
        alike: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for p, w, update in zip(params, weights, updates, strict=True):
            mine = set(factors[p.shape])
            those, theirs = alike.setdefault(mine.pop() if len(mine) == 1 else 1.0, ([], []))
            those.append(w)
            theirs.append(update)
        for factor, (those, theirs) in alike.items():
            torch._foreach_add_(those, theirs, alpha=-lr * factor)
        # a DTensor does not notice that its shard was written; it may have been saved for a gradient
        torch.autograd.graph.increment_version([p for p, w in zip(params, weights, strict=True) if p is not w])

    def _momenta(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Moves each parameter's momentum on and returns the updates to orthogonalize, or this process's shards of them."""
        grads = [p.grad for p in params if p.grad is not None]
        for p, grad in zip(params, grads, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        buffers, grads = [local(self.state[p]["momentum_buffer"]) for p in params], [local(g) for g in grads]
        for buffer, grad in zip(buffers, grads, strict=True):
            if buffer.shape != grad.shape:  # which would be broadcast, where it can be
                raise ValueError(
                    f"a momentum_buffer has the shape {tuple(buffer.shape)}, its gradient {tuple(grad.shape)}; expected the "
                    "same: state belongs to parameters shaped and sharded as they then were"
                )
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        return list(torch._foreach_lerp(grads, buffers, group["momentum"])) if group["nesterov"] else buffers

    def _others(self) -> None:
        """AdamW's step on parameters that are no matrices, by an optimizer of its own on this one's state."""
        others = [[p for p in group["params"] if not is_matrix(p, group)] for group in self.param_groups]
        if not any(others):
            return
        if self._adamw is None:
            self._adamw = AdamW([{"params": params} for params in others if params])
        if isinstance(self.state, state.States):
            self._adamw._changes = self.state.changes
        self._adamw.state = self.state
        groups = [group for group, params in zip(self.param_groups, others, strict=True) if params]
        for theirs, group in zip(self._adamw.param_groups, groups, strict=True):
            theirs.update(
                lr=float(group["lr"]),
                betas=group["adamw_betas"],
                eps=group["adamw_eps"],
                weight_decay=group["weight_decay"],
            )
        self._adamw.step()
        self.state = self._adamw.state  # which records changes for it


_untraced_step = torch._disable_dynamo(Muon.step)  # as OneLaunch's: a break of the graph
MuonW = Muon  # the same: ``torch.optim.Muon`` decays weights as AdamW does


def is_matrix(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether Muon's step is for this parameter."""
    return p.ndim >= 2 and group["use_muon"] is not False


def names_of_state(p: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
    """Names of what belongs to a parameter's state."""
    return ("momentum_buffer",) if is_matrix(p, group) else state.names_of(ADAM, {"amsgrad": False})


def check_gradient(p: Tensor) -> None:
    """Raises RuntimeError for a gradient that Muon does not take."""
    grad = p.grad
    if grad is None:
        return
    if torch.is_complex(p):
        raise RuntimeError("Muon does not support complex parameters")
    if grad.is_sparse:
        raise RuntimeError(
            "Muon does not support sparse gradients; expected a group with use_muon=False, or dense ones"
        )
    ours, theirs = (getattr(t, "placements", None) for t in (p, grad))
    if ours != theirs:
        raise RuntimeError(f"a parameter is placed as {ours} and its gradient as {theirs}; expected the same")


def check_muon_options(group: dict[str, Any]) -> None:
    """Raises ValueError for options out of their ranges, in PyTorch's words where it has some; TypeError for flags that
    are not bools."""
    check_flags(group)
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    kinds: dict[str, Any] = {"lr": (Real, Tensor), "update_rms": (Real, type(None))}
    for name in ("lr", "momentum", "weight_decay", "eps", "adamw_eps", "update_rms"):
        if isinstance(group[name], bool) or not isinstance(group[name], kinds.get(name, Real)):
            raise ValueError(f"{name} should be a number but is: {group[name]!r:.40}")
    if not (lr >= 0.0 and math.isfinite(lr)):
        raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
    if not 0.0 <= group["momentum"] <= 1.0:
        raise ValueError(f"momentum should be >= 0 and <= 1 but is: {group['momentum']}")
    if not (group["weight_decay"] >= 0.0 and math.isfinite(group["weight_decay"])):
        raise ValueError(f"weight decay should be >= 0 but is: {group['weight_decay']}")
    if group["adjust_lr_fn"] not in SCALES:
        raise ValueError(
            f"Adjust learning rate function {group['adjust_lr_fn']} is not supported; expected original or match_rms_adamw"
        )
    if not (group["eps"] > 0 and math.isfinite(group["eps"])):
        raise ValueError(f"eps should be > 0 but is: {group['eps']}")
    steps = schedule(group["ns_coefficients"], group["ns_steps"])
    if not all(math.isfinite(value) for step in steps for value in step):
        raise ValueError(f"ns_coefficients should be finite but are: {group['ns_coefficients']}")
    if group["update_rms"] is not None:
        if not (group["update_rms"] > 0 and math.isfinite(group["update_rms"])):
            raise ValueError(f"update_rms should be > 0 or None but is: {group['update_rms']}")
        if group["adjust_lr_fn"] is not None:
            raise ValueError(
                f"update_rms is {group['update_rms']} and adjust_lr_fn {group['adjust_lr_fn']}: each sets the update's size; "
                "expected one of them"
            )
    if group["ns_dtype"] not in DTYPES:
        raise ValueError(f"ns_dtype should be one of {', '.join(map(str, DTYPES))} but is: {group['ns_dtype']}")
    if group["higher_dims"] not in HIGHER_DIMS:
        raise ValueError(f"higher_dims should be one of {', '.join(HIGHER_DIMS)} but is: {group['higher_dims']}")
    parts = group["split_rows"]
    sizes = [parts] if isinstance(parts, int) else parts or [1]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes):
        raise ValueError(f"split_rows should be a number of parts or their sizes, at least 1, but is: {parts}")
    check_betas(group["adamw_betas"])
    if not group["adamw_eps"] >= 0.0:
        raise ValueError(f"Invalid epsilon value: {group['adamw_eps']}")


# ---- from momenta to updates -------------------------------------------------------------------------------------------


def updates_of(
    params: Sequence[Tensor], momenta: Sequence[Tensor], group: dict[str, Any], process_group: Any
) -> list[Tensor]:
    """What every momentum's orthogonalisation adds to this process's part of the parameter, but for the sign, the learning
    rate, and a factor that all of its matrices share.

    Args:
        params: matrices and more, of one group of options; DTensors and others.
        momenta: of each what is to be orthogonalized; of a DTensor this process's shard.
        process_group: of processes that have the same parameters which are no DTensors; or None.
    """
    alike: dict[Any, list[int]] = {}
    shapes: dict[int, tuple[torch.Size, ...]] = {}
    everywhere = Layout((), () if process_group is None else (process_group,))
    for i, (p, m) in enumerate(zip(params, momenta, strict=True)):
        layout, dtype = everywhere, None
        if hasattr(p, "device_mesh"):
            layout, shapes[i] = layout_of(p, group["higher_dims"] == "batch")
            dtype = m.dtype
        alike.setdefault((layout, m.device, dtype), []).append(i)
    found: dict[int, Tensor] = {}
    for (layout, _, _), places in alike.items():
        work = partial(orthogonalized, group=group, replicas=layout.replicas)
        if not layout.cuts:
            results = work([momenta[i] for i in places])
        else:
            shards = [Shard(momenta[i], shapes[i], cost_of(shapes[i][-1], group)) for i in places]
            uneven = any(len(set(factors_of(s.shapes[-1], group))) > 1 for s in shards)
            results = work_on_whole(shards, layout.cuts, work, torch.float32 if uneven else result_dtype(group))
        found.update(zip(places, results, strict=True))
    return [found[i] for i in range(len(params))]


def orthogonalized(updates: Sequence[Tensor], group: dict[str, Any], replicas: Sequence[Any]) -> list[Tensor]:
    """Whole updates orthogonalized, each process of ``replicas`` (groups) taking its share. Where a parameter's matrices have
    factors that differ, these are applied, in fp32."""
    cuts = [cut(u, group["higher_dims"], group["split_rows"]) if u.numel() else [] for u in updates]

    def each(matrices: Sequence[Tensor]) -> list[Tensor]:
        return batched(matrices, lambda stack: orthogonal(stack, group))

    work: Work = each
    for processes in replicas:
        work = partial(share_work, work=work, group=processes, dtype=result_dtype(group))
    left = iter(work([m for parts in cuts for m in parts]))
    known = factors_by_shape(updates, group)
    results = []
    for u, matrices in zip(updates, cuts, strict=True):
        parts = [next(left) for _ in matrices]
        factors = known[u.shape]
        if len(set(factors)) > 1:
            parts = [part.float() * factor for part, factor in zip(parts, factors, strict=True)]
        results.append(joined(parts, u.shape) if parts else u)
    return results


def orthogonal(stack: Tensor, group: dict[str, Any]) -> Tensor:
    """Nearly the polar factors of matrices [B, M, N], each scaled to the group's root mean square if it has one."""
    wide = stack.float() if stack.dtype == torch.float64 else stack
    options = {"eps": group["eps"], "dtype": group["ns_dtype"]}
    out: Tensor = ops.newton_schulz(wide, group["ns_steps"], group["ns_coefficients"], **options)
    if group["update_rms"] is None:
        return out
    norm = torch.linalg.vector_norm(out, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    rms = norm / math.sqrt(stack.shape[-2] * stack.shape[-1])
    return out * (group["update_rms"] / rms.clamp_min(torch.finfo(torch.float32).tiny))


def result_dtype(group: dict[str, Any]) -> torch.dtype:
    """Of what :func:`orthogonal` returns."""
    return torch.float32 if group["update_rms"] is not None else group["ns_dtype"]


def factors_of(shape: Sequence[int], group: dict[str, Any]) -> list[float]:
    """What each matrix of a parameter's update is multiplied with."""
    matrices = shapes_of(shape, group["higher_dims"], group["split_rows"])
    return [1.0 if group["update_rms"] is not None else scale_of(group["adjust_lr_fn"], *m) for m in matrices]


def factors_by_shape(tensors: Sequence[Tensor], group: dict[str, Any]) -> dict[torch.Size, list[float]]:
    """:func:`factors_of` every shape that there is: a model has many matrices and few shapes."""
    return {shape: factors_of(shape, group) for shape in dict.fromkeys(t.shape for t in tensors)}


def cost_of(shape: Sequence[int], group: dict[str, Any]) -> float:
    """Of orthogonalising a parameter's update."""
    return sum(cost(*m) for m in shapes_of(shape, group["higher_dims"], group["split_rows"]))


# ---- from updates to matrices and back ---------------------------------------------------------------------------------
#
# A parameter's update is cut into matrices (a fused projection by rows, a convolution flattened, stacked experts one by one).
# Matrices of one shape are stacked and orthogonalized in one batched call.


def cut(update: Tensor, higher_dims: str, split_rows: int | Sequence[int] | None) -> list[Tensor]:
    """The matrices of an update, in the order of its elements.

    Args:
        update: of a parameter's shape, two dimensions or more.
        higher_dims: more than two dimensions are *flatten*\\ ed to [M, rest], as of convolutions, or a *batch* of matrices.
        split_rows: into how many equal parts, or parts of which sizes, the rows of each matrix are cut.
    """
    if update.ndim == 2 or higher_dims == "flatten":
        matrices = [update.flatten(1)]
    else:
        matrices = list(update.flatten(0, -3))
    if split_rows is None:
        return matrices
    return [part for m in matrices for part in m.split(rows_of_parts(m.shape[0], split_rows))]


def shapes_of(shape: Sequence[int], higher_dims: str, split_rows: int | Sequence[int] | None) -> list[tuple[int, int]]:
    """Rows and columns of the matrices that :func:`cut` makes of a parameter of this shape."""
    if len(shape) == 2 or higher_dims == "flatten":
        count, rows, columns = 1, shape[0], math.prod(shape[1:])
    else:
        count, (rows, columns) = math.prod(shape[:-2]), shape[-2:]
    parts = [rows] if split_rows is None else rows_of_parts(rows, split_rows)
    return [(part, columns) for _ in range(count) for part in parts]


def rows_of_parts(rows: int, split_rows: int | Sequence[int]) -> list[int]:
    """Rows of each part.

    Raises:
        ValueError: parts that do not add up to the rows.
    """
    if isinstance(split_rows, int):
        if rows % split_rows:
            raise ValueError(f"split_rows is {split_rows}, which does not divide the {rows} rows of a parameter")
        return [rows // split_rows] * split_rows
    if sum(split_rows) != rows:
        raise ValueError(
            f"split_rows is {tuple(split_rows)}, {sum(split_rows)} rows together; expected the {rows} rows of a parameter"
        )
    return list(split_rows)


def joined(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """The update again, from its matrices."""
    if len(parts) == 1:
        return parts[0].reshape(shape)
    return torch.cat([part.reshape(-1) for part in parts]).view(shape)


def batched(matrices: Sequence[Tensor], orthogonalize: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Each matrix orthogonalized, those of one shape in one call."""
    found: dict[int, Tensor] = {}
    for same in by_shape(matrices):
        for index, result in zip(same, orthogonalize(torch.stack([matrices[i] for i in same])), strict=True):
            found[index] = result
    return [found[i] for i in range(len(matrices))]


def by_shape(matrices: Sequence[Tensor]) -> list[list[int]]:
    """Indices of matrices of one shape, dtype and device, at most ``STACKED`` elements together."""
    groups: dict[Any, list[int]] = {}
    for i, m in enumerate(matrices):
        groups.setdefault((m.shape, m.dtype, m.device), []).append(i)
    cuts = []
    for (shape, _, _), places in groups.items():
        most = max(STACKED // max(shape.numel(), 1), 1)
        cuts += [places[i : i + most] for i in range(0, len(places), most)]
    return cuts


def scale_of(rule: str | None, rows: int, columns: int) -> float:
    """What an orthogonal update is multiplied with: *original* (also None) √max(1, rows / columns) (Jordan et al. 2024);
    *match_rms_adamw* 0.2 · √max(rows, columns), the root mean square that AdamW's updates have (Liu et al. 2025, "Muon is
    Scalable for LLM Training", arXiv 2502.16982)."""
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(columns, 1)))
