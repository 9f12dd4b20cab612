"""From Muon's momenta to the updates of parameters, on one process or on several that share the work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.optim.muon_matrices import batched, cost, cut, joined, scale_of, shapes_of, shared_out
from weft.optim.muon_shards import Layout, Shard, brought_together, lies


def updates_of(
    params: Sequence[Tensor], momenta: Sequence[Tensor], group: dict[str, Any], process_group: Any
) -> list[Tensor]:
    """What every momentum's orthogonalisation adds to this process's part of the parameter, but for the sign, the learning
    rate, and a factor that all of its matrices share.

    Args:
        params: matrices and more, of one group of options; DTensors and others.
        momenta: of each what is to be orthogonalised; of a DTensor this process's shard.
        process_group: of processes that have the same parameters which are no DTensors; or None.
    """
    alike: dict[Any, list[int]] = {}
    shapes: dict[int, tuple[torch.Size, ...]] = {}
    everywhere = Layout((), () if process_group is None else (process_group,))
    for i, (p, m) in enumerate(zip(params, momenta, strict=True)):
        layout, dtype = everywhere, None
        if hasattr(p, "device_mesh"):
            layout, shapes[i] = lies(p, group["higher_dims"] == "batch")
            dtype = m.dtype
        alike.setdefault((layout, m.device, dtype), []).append(i)
    found: dict[int, Tensor] = {}
    for (layout, _, _), places in alike.items():
        work = partial(orthogonalised, group=group, replicas=layout.replicas)
        if not layout.cuts:
            results = work([momenta[i] for i in places])
        else:
            shards = [Shard(momenta[i], shapes[i], cost_of(shapes[i][-1], group)) for i in places]
            uneven = any(len(set(factors_of(s.shapes[-1], group))) > 1 for s in shards)
            results = brought_together(shards, layout.cuts, work, torch.float32 if uneven else result_dtype(group))
        found.update(zip(places, results, strict=True))
    return [found[i] for i in range(len(params))]


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


def orthogonalised(updates: Sequence[Tensor], group: dict[str, Any], replicas: Sequence[Any]) -> list[Tensor]:
    """Whole updates orthogonalised, each process of ``replicas`` (groups) taking its share. Where a parameter's matrices have
    factors that differ, these are applied, in fp32."""
    cuts = [cut(u, group["higher_dims"], group["split_rows"]) if u.numel() else [] for u in updates]

    def each(matrices: Sequence[Tensor]) -> list[Tensor]:
        return batched(matrices, lambda stack: orthogonal(stack, group))

    for processes in replicas:
        each = partial(shared_out, each=each, group=processes, dtype=result_dtype(group))
    left = iter(each([m for parts in cuts for m in parts]))
    known = factors_by_shape(updates, group)
    results = []
    for u, matrices in zip(updates, cuts, strict=True):
        parts = [next(left) for _ in matrices]
        factors = known[u.shape]
        if len(set(factors)) > 1:
            parts = [part.float() * factor for part, factor in zip(parts, factors, strict=True)]
        results.append(joined(parts, u.shape) if parts else u)
    return results


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
