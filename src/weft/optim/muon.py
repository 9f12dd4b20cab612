"""``Muon`` and ``MuonW``: momentum orthogonalised by Newton–Schulz iterations, and AdamW for what is no matrix.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): B ← μ·B + (1 − μ)·G; the update is the orthogonal polar
factor of (1 − μ)·G + μ·B (Nesterov) or of B, times a factor for the matrix's shape. ``MuonW`` decays weights beside it, as
AdamW does: W ← W − lr · λ · W. Arguments and state are named as ``torch.optim.Muon``'s, whose state dicts they exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.operators.orthogonalization.coefficients import CLASSIC, Coefficients, schedule
from weft.optim.muon_matrices import HIGHER_DIMS, batched, cut, joined, rows_of_parts, scale_of, shared_out

SCALES = (None, "original", "match_rms_adamw")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class MuonW(torch.optim.Optimizer):
    """Muon with decoupled weight decay; the same step as ``torch.optim.Muon``.

    Args:
        params: parameters, or groups (dicts) of them with options of their own. Parameters of two dimensions and more are
            matrices; the others, and all of a group with ``use_muon=False`` (embeddings, output layers), take AdamW.
        lr: learning rate, at least 0, of both algorithms; a number or a tensor of one element. Give groups their own where
            AdamW wants another.
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
            orthogonalised on their own: 3, or (4096, 1024, 1024), for a fused projection of queries, keys and values.
        higher_dims: of parameters with more than two dimensions: ``flatten`` to [M, rest], as convolutions want, or ``batch``
            for matrices [..., M, N], as stacked experts are.
        use_muon: of a group: None for matrices only, True (all parameters must be matrices), or False for AdamW.
        ns_dtype: that the iteration is computed in: bfloat16, float16 or float32.
        betas, adamw_eps: AdamW's.
        process_group: processes that have the same parameters and gradients (DDP): each orthogonalises its share of the
            matrices, and the results are all-gathered. None: every process does all of it.

    Raises:
        ValueError: options out of their ranges; a parameter in two groups; parts that are not a parameter's rows.
        RuntimeError: at a step, complex parameters or sparse gradients.
        NotImplementedError: at a step, parameters that are DTensors.

    Momentum is kept in ``state[p]["momentum_buffer"]``, of the gradient's dtype.
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
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        process_group: Any = None,
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
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        self.process_group = process_group
        self._adamw: torch.optim.Optimizer | None = None
        super().__init__(params, defaults)

    # ---- groups and state --------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; options that it does not say are the optimizer's."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._adamw = None

    def _check(self, group: dict[str, Any]) -> None:
        check_options(group)
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of ``torch.optim.Muon``; options that it does not know stay as they are.

        Raises:
            ValueError: other numbers of parameters; options out of their ranges; a state of another shape than its parameter.
        """
        if len(state_dict["param_groups"]) == len(self.param_groups):
            merged = [
                {**mine, **theirs} for mine, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True)
            ]
            for group in merged:
                self._check({**group, "params": []})
            state_dict = {**state_dict, "param_groups": merged}
        before = self.__getstate__()
        super().load_state_dict(state_dict)
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                for name, value in self.state.get(p, {}).items():
                    if isinstance(value, Tensor) and name != "step" and value.shape != p.shape:
                        self.__setstate__(before)
                        raise ValueError(
                            f"loaded state dict has a {name} of shape {tuple(value.shape)} for parameter {i} of group {g}, "
                            f"whose shape is {tuple(p.shape)}"
                        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = getattr(self, "process_group", None)  # processes are not pickled
        self._adamw = None
        super().__setstate__(state)

    # ---- the step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step from the gradients as they are; ``closure`` computes them again and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._muon(group)
        self._others()
        return loss

    def _muon(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None and p.numel() and is_matrix(p, group)]
        if not params:
            return
        updates = self._momenta(params, group)
        cuts = [cut(u, group["higher_dims"], group["split_rows"]) for u in updates]
        matrices = [m for parts in cuts for m in parts]
        del updates

        def orthogonalise(stack: Tensor) -> Tensor:
            return orthogonal(stack, group)

        if self.process_group is None:
            results = batched(matrices, orthogonalise)
        else:
            dtype = group["ns_dtype"] if group["update_rms"] is None else torch.float32
            results = shared_out(matrices, orthogonalise, self.process_group, dtype)
        lr, decay = float(group["lr"]), group["weight_decay"]
        if decay and all(p.is_cuda for p in params):
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            for p in params:  # on a CPU the former would round the factor to bf16: 0.998 to 0.996
                p.mul_(1 - lr * decay)
        left = iter(results)
        for p, parts in zip(params, cuts, strict=True):
            apply(p, [next(left) for _ in parts], lr, group)

    def _momenta(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Moves each parameter's momentum on and returns what is to be orthogonalised."""
        grads = [p.grad for p in params if p.grad is not None]
        for p, grad in zip(params, grads, strict=True):
            if torch.is_complex(p):
                raise RuntimeError("Muon does not support complex parameters")
            if grad.is_sparse:
                raise RuntimeError(
                    "Muon does not support sparse gradients; expected a group with use_muon=False, or dense ones"
                )
            if hasattr(p, "device_mesh"):
                raise NotImplementedError(
                    "Muon does not take DTensors: a shard's polar factor is not a shard of the polar factor; expected whole "
                    "parameters (DDP), with process_group= to share the work out"
                )
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        return list(torch._foreach_lerp(grads, buffers, group["momentum"])) if group["nesterov"] else buffers

    def _others(self) -> None:
        """AdamW's step on what is no matrix. It is an optimizer of its own, on this one's state."""
        others = [[p for p in group["params"] if not is_matrix(p, group)] for group in self.param_groups]
        if not any(others):
            return
        if self._adamw is None:
            self._adamw = adamw()([{"params": params} for params in others if params])
        self._adamw.state = self.state
        groups = [group for group, params in zip(self.param_groups, others, strict=True) if params]
        for theirs, group in zip(self._adamw.param_groups, groups, strict=True):
            theirs.update(
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["adamw_eps"],
                weight_decay=group["weight_decay"],
            )
        self._adamw.step()


class Muon(MuonW):
    """Muon without weight decay. Arguments as :class:`MuonW`'s, without ``weight_decay``."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = CLASSIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Any,
    ):
        if "weight_decay" in options:
            raise TypeError("Muon takes no weight_decay: MuonW does")
        super().__init__(params, lr, 0.0, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn, **options)

    def _check(self, group: dict[str, Any]) -> None:
        if group["weight_decay"] != 0:
            raise ValueError(f"weight_decay is {group['weight_decay']}, and Muon decays no weights: MuonW does")
        super()._check(group)


def is_matrix(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether Muon's step is for this parameter."""
    return p.ndim >= 2 and group["use_muon"] is not False


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


def apply(p: Tensor, parts: list[Tensor], lr: float, group: dict[str, Any]) -> None:
    """p ← p − lr · scale · update, for an update in parts."""
    if group["update_rms"] is not None:
        scales = [1.0]
    else:
        scales = [scale_of(group["adjust_lr_fn"], *part.shape) for part in parts]
    if len(set(scales)) > 1:
        parts, scales = [part.float() * s for part, s in zip(parts, scales, strict=True)], [1.0]
    p.add_(joined(parts, p.shape), alpha=-lr * scales[0])


def adamw() -> Any:
    """weft's AdamW where there is one, else PyTorch's."""
    import weft.optim as optim  # late: it imports this module

    return getattr(optim, "AdamW", torch.optim.AdamW)


def check_options(group: dict[str, Any]) -> None:
    """Raises ValueError for options out of their ranges, in PyTorch's words where it has some."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
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
    schedule(group["ns_coefficients"], group["ns_steps"])
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
    for i, beta in enumerate(group["betas"]):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not group["adamw_eps"] >= 0.0:
        raise ValueError(f"Invalid epsilon value: {group['adamw_eps']}")
