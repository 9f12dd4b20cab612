"""``Muon`` and ``MuonW``: momentum orthogonalised by Newton–Schulz iterations, and AdamW for what is no matrix.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): B ← μ·B + (1 − μ)·G; the update is the orthogonal polar
factor of (1 − μ)·G + μ·B (Nesterov) or of B, times a factor for the matrix's shape. ``MuonW`` decays weights beside it, as
AdamW does: W ← W − lr · λ · W. Arguments and state are named as ``torch.optim.Muon``'s, whose state dicts they exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.operators.optimizer.adam_rule import ADAM
from weft.operators.orthogonalization.coefficients import CLASSIC, Coefficients
from weft.optim import saved
from weft.optim.adam import AdamW
from weft.optim.codes import local
from weft.optim.muon_matrices import rows_of_parts
from weft.optim.muon_options import check_options
from weft.optim.muon_updates import factors_by_shape, updates_of
from weft.optim.options import check_flags, each_once


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
        skip_nonfinite: a step with a gradient that is not finite changes nothing but ``skipped_steps``, on all processes of
            the group or the meshes. Waits for the device.

    DTensors (FSDP2, tensor parallelism) need no ``process_group``: along mesh dimensions that they are sharded on, each process
    takes its share of the parameters whole, orthogonalises them and sends every process its shard of the update; replicas share
    the matrices. All processes must have gradients for the same parameters.

    Raises:
        ValueError: options out of their ranges; a parameter that is there twice; parts that are not a parameter's rows; at a
            step, a momentum of another shape than its gradient.
        RuntimeError: at a step, complex parameters, sparse gradients, gradients placed otherwise than their parameter.
        NotImplementedError: at a step, DTensors placed otherwise than as shards (of ``torch.chunk``) and replicas.

    Momentum is kept in ``state[p]["momentum_buffer"]``, of the gradient's dtype and placements.
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
        betas: tuple[float, float] = (0.9, 0.999),
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
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        check_flags({"skip_nonfinite": skip_nonfinite})
        self.process_group, self.skip_nonfinite, self.skipped_steps = process_group, skip_nonfinite, 0
        self._adamw: AdamW | None = None
        super().__init__(params, defaults)

    # ---- groups and state --------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; options that it does not say are the optimizer's."""
        param_group = each_once(param_group)
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

    def state_dict(self) -> dict[str, Any]:
        """As PyTorch's; of Muon's parameters that of ``torch.optim.Muon``, of the others that of ``torch.optim.AdamW``."""
        return saved.export(super().state_dict(), [] if self._adamw is None else self._adamw._parts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of ``torch.optim.Muon``; options that it does not know stay as they are.

        Raises:
            ValueError: other numbers of parameters; options out of their ranges; a state that lacks something (other than all),
                or one of another shape or dtype than it should be. Nothing is loaded then.
        """

        def prepare(given: dict[str, Any]) -> dict[str, Any]:
            if len(given["param_groups"]) != len(self.param_groups):
                return given  # which PyTorch refuses
            groups = [{**mine, **theirs} for mine, theirs in zip(self.param_groups, given["param_groups"], strict=True)]
            for group in groups:
                self._check({**group, "params": []})
            options = [group for group in groups for _ in group["params"]]
            pairs = saved.pairs_of(self, given)
            saved.check(pairs, [kept(p, group) for (_, p), group in zip(pairs, options, strict=False)])
            return {**given, "param_groups": groups}

        saved.load(self, state_dict, prepare)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "skip_nonfinite": self.skip_nonfinite,
            "skipped_steps": self.skipped_steps,
        }

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
        bad = torch.zeros((), device=local((sharded or params)[0]).device)
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
        # DTensors do not know that their shards were written; whoever saved them for a gradient must hear of it
        torch.autograd.graph.increment_version([p for p, w in zip(params, weights, strict=True) if p is not w])

    def _momenta(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Moves each parameter's momentum on and returns what is to be orthogonalised, or this process's shard of it."""
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
        """AdamW's step on what is no matrix. It is an optimizer of its own, on this one's state."""
        others = [[p for p in group["params"] if not is_matrix(p, group)] for group in self.param_groups]
        if not any(others):
            return
        if self._adamw is None:
            self._adamw = AdamW([{"params": params} for params in others if params])
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
        self.state = self._adamw.state  # which tells it of changes; with another one it would start over at every step


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
        known = MuonW.__init__.__kwdefaults__ or {}
        if unknown := options.keys() - known:
            raise TypeError(f"Muon: unknown option {min(unknown)!r} (there are: {', '.join(known)})")
        super().__init__(params, lr, 0.0, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn, **options)

    def _check(self, group: dict[str, Any]) -> None:
        if group["weight_decay"] != 0:
            raise ValueError(f"weight_decay is {group['weight_decay']}, and Muon decays no weights: MuonW does")
        super()._check(group)


def is_matrix(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether Muon's step is for this parameter."""
    return p.ndim >= 2 and group["use_muon"] is not False


def kept(p: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
    """Names of what belongs to a parameter's state."""
    return ("momentum_buffer",) if is_matrix(p, group) else saved.names_of(ADAM, {"amsgrad": False})


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
