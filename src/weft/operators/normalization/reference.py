"""What the definitions of the four norms share: the formula, inputs, cost, tolerance, workloads, mutants."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Tolerance, Workload, workload, workloads
from weft.operators import mutants
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

WIDTHS = (256, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


def normalised(h: Tensor, weight: Any, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    """The formula, in fp32 (in float64 for float64), rounded once."""
    wide = h if h.dtype == torch.float64 else h.float()
    if centered:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(h.dtype)


points = functools.partial(workloads, "MN")
SHAPES = (  # that are verified
    (1, 1), (3, 5), (2, 256), (37, 100), (5, 1000), (3, 2048), (1, 4097), (3, 8200), (2, 8201), (2, 33000), (19, 259),
    (3, 157), (2, 601), (9, 2103),  # gradients hold them in two tiles
)  # fmt: skip


def define(norm: Any, eps: float, **sets: list[Workload]) -> dict[str, Any]:
    """The fields of an ``Operator`` that is a ``Norm`` (dispatch.py) over rows [M, N]: x, a residual if ``added``, a weight
    [N], a bias [N] if ``centered``; further ``sets`` of workloads."""
    reference, centered, added = norm.reference, norm.centered, norm.added
    cancels = centered or added  # h - mean, or x + residual
    tensors = ("x", *(("residual",) if added else ()), "weight", *(("bias",) if centered else ()))

    def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
        layout, values = w.option("layout", "contiguous"), w.option("values", "normal")

        def rows(**more: Any) -> Tensor:
            return random_tensor(g, (w["M"], w["N"]), w.dtype, device, layout=layout, **more)

        def row(given: bool) -> Tensor | None:
            made = random_tensor(g, (w["N"],), w.dtype, device, layout=w.option("weight_layout", "contiguous"))
            return made if given else None

        made: dict[str, Any] = {"x": rows(values=values)}
        if w.option("offset", 0):
            made["x"] += w.option("offset", 0)
        if added:
            made["residual"] = rows()
        made["weight"] = row(w.option("weight", True))
        if centered:
            made["bias"] = row(w.option("weight", True) and w.option("bias", True))
        return {**made, "eps": eps}

    def cost(w: Workload, direction: str) -> Cost:
        n, size = w["M"] * w["N"], w["M"] * w["N"] * w.bytes_per_element
        rows = w["N"] * w.bytes_per_element * w.option("weight", True)
        biases = rows * centered * w.option("bias", True)
        roots = 2 * w["M"]
        if direction == "forward":
            writes = size * (1 + added)
            return Cost(
                size * (1 + added) + rows + biases, writes, vector_flops=(6 if cancels else 4) * n, special_ops=roots
            )
        return Cost(
            size * (2 + added) + rows, size + rows + biases, vector_flops=(12 if cancels else 10) * n, special_ops=roots
        )

    def terms(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """What is normalised, 1 / deviation of each row, and how large the terms of the former are: x, residual and mean may
        cancel, and errors are relative to them."""
        x, residual = arguments["x"], arguments.get("residual")
        h = x if residual is None else x + residual
        size = x.abs() if residual is None else x.abs() + residual.abs()
        if (
            centered
        ):  # a sum is rounded at the size of its parts: of n random terms √n times one, of which the mean is 1/n
            typical = h.square().mean(-1, keepdim=True).sqrt() / max(h.shape[-1], 1) ** 0.5
            size = size + h.mean(-1, keepdim=True).abs() + typical
            h = h - h.mean(-1, keepdim=True)
        return h, torch.rsqrt(h.square().mean(-1, keepdim=True) + arguments["eps"]), size

    def forward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
        _, rstd, size = terms(arguments)
        weight, bias = arguments["weight"], arguments.get("bias")
        y = size * rstd if weight is None else size * rstd * weight.abs()
        y = y if bias is None else y + bias.abs()
        return [y, size] if added else [y]

    def backward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
        """Of dx (and the residual's), dw and db, in the order of the gradients."""
        weight, dy = arguments["weight"], gradients[0]
        h, rstd, size = terms(arguments)
        g = dy if weight is None else dy * weight
        dx = rstd * g.square().mean(-1, keepdim=True).sqrt()
        if cancels:  # h errs, and with it its product with this mean
            dx = dx + size * rstd.square() * (g * h * rstd).mean(-1, keepdim=True).abs()
        dx = dx.maximum(gradients[1].abs()) if added else dx
        found = [dx, dx] if added else [dx]
        if weight is not None:
            found.append((dy * size * rstd).square().sum(0).sqrt())
        if arguments.get("bias") is not None:
            found.append(dy.square().sum(0).sqrt())
        return found

    gradient = mutants.gradient_of(reference, *tensors)

    def every(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        def wrong(**named: Any) -> Any:
            out = reference(**named)
            return tuple(change(o) for o in out) if isinstance(out, tuple) else change(out)

        return wrong

    def of(named: dict[str, Any], weight: Any, eps: float, centered: bool) -> Any:
        h = named["x"] + named["residual"] if added else named["x"]
        y = normalised(h, weight, named.get("bias"), eps, centered)
        return (y, h) if added else y

    def mean_over_padding(**named: Any) -> Any:
        """The mean square divided by one more than the number of columns."""
        n = max(named["x"].shape[-1], 1)
        more = (n + 1) / n
        weight = 1.0 if named["weight"] is None else named["weight"].float()
        return of(named, weight * more**0.5, eps * more, centered)

    def other_norm(**named: Any) -> Any:
        return of(named, named["weight"], eps, not centered)

    def last_row_left_out(*dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
        """dw without the last row."""
        found, at = list(gradient(*dy, **named)), 1 + added
        if len(found) > at:
            found[at] = gradient(*(torch.cat((d[:-1], torch.zeros_like(d[-1:]))) for d in dy), **named)[at]
        else:
            found[0] = torch.zeros_like(found[0])
        return tuple(found)

    def no_projection(*dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
        """The gradient as if the row's statistics were constants."""
        _, *rest = gradient(*dy, **named)
        wide = {name: named[name].float() for name in tensors if named[name] is not None}
        _, rstd, _ = terms({**named, **wide})
        return (dy[0].float() * wide.get("weight", 1.0) * rstd).to(dy[0].dtype), *rest

    return {
        "name": norm.name,
        "axes": {"M": "rows", "N": "columns"},
        "inputs": inputs,
        "reference": reference,
        "cost": cost,
        "options": {
            "layout": LAYOUTS,
            "values": VALUES,
            "weight": (True, False),
            "weight_layout": LAYOUTS,
            **({"bias": (True, False)} if centered else {}),
            "offset": range(1, 2**20),
        },
        "differentiable": tensors,
        "tolerance": {
            "forward": Tolerance(scale=forward_scale, ulps=2.0),
            "backward": Tolerance(scale=backward_scale, terms=lambda w: 32),
        },
        "workloads": {
            "verify": [
                *points(*SHAPES),
                *points((0, 7), (7, 0)),
                *(w for layout in LAYOUTS[1:] for w in points((9, 33), layout=layout)),
                *points((70, 2100), layout="transposed"),
                *points((9, 40), (9, 8192), weight=False),
                *points((9, 40), weight_layout="strided"),
                *([*points((9, 40), bias=False), *points((9, 300), offset=100)] if centered else []),
                *points((6, 64), values="tiny"),
                *points((40, 50), (9, 8264), values="nonfinite"),
            ],
            "full": [
                *points((70, 2**14), (70, 2**15 + 1), (70, 2**16 + 8), (70, 2**17)),
                *(workload(M=300, N=n) for n in (256, 264, 512, 2048, 4097, 8192)),
                *points((40, 8264), (40, 2**15), values="nonfinite"),
                *(points((70, 2**15), offset=100) if centered else []),
            ],
            "huge": [workload("bf16", M=2**14 + 1, N=2**17), workload("bf16", M=2**23 + 3, N=257)],
            "ladder": [workload("fp32", M=2**28 // 4096, N=4096)],
            "bench": [workload(M=2**28 // n, N=n) for n in WIDTHS],
            "quick": [workload(M=2**22 // n, N=n) for n in (1024, 4096)],
            "compile": [workload(M=64, N=n) for n in (100, 603, 4096, 2**16)] + points((64, 4100), layout="transposed"),
            "tune": [
                workload(d, M=2**28 // n, N=n)
                for d in ("fp32", "bf16")
                for n in ((256, 512) if added else (64, 128, 256, 512)) + (1024, 2048, *WIDTHS[2:])
            ],
            "model": [workload("bf16", M=8192, N=n) for n in (4096, 5120, 8192)],
            **sets,
        },
        "mutants": [
            *mutants.usual(reference if not added else lambda **named: reference(**named)[0]),
            Mutant("the other norm", other_norm),
            Mutant("mean over padding", mean_over_padding),
            Mutant("weight left out", lambda **named: reference(**{**named, "weight": None})),
            Mutant("one part in 50 too large", every(lambda y: y * 1.02)),
            *mutants.usual(gradient, "backward"),
            Mutant("projection left out", no_projection, "backward"),
            Mutant("last row left out of dw", last_row_left_out, "backward"),
        ],
    }
