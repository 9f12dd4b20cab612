"""``adamw_8bit(params, grads, codes and scales of two moments, steps, …)``: a step of AdamW whose moments take 8 bits each."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators.call import FLOATS
from weft.operators.checks import check_shape, check_tensor
from weft.operators.mutants import changed
from weft.operators.optimizer import adam, dispatch, workloads
from weft.operators.optimizer.blockwise import BLOCKS, STATE_FORMATS, blocks_of, dequantize, quantize, random_bits
from weft.operators.optimizer.dispatch import Arguments
from weft.operators.optimizer.rules import ADAM

Tensors = Sequence[Tensor]
Moment = tuple[Tensor, Tensor]  # codes and scales; or both moments, as a peer has them
adamw_in_32_bits = adam.reference(decoupled=True)


@torch.no_grad()
def reference(
    params: Tensors, grads: Tensors, exp_avg_codes: Tensors, exp_avg_scales: Tensors, exp_avg_sq_codes: Tensors,
    exp_avg_sq_scales: Tensors, steps: Tensors, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8, weight_decay: float = 1e-2, maximize: bool = False, block_size: int = 256,
    state_format: str = "dynamic", seed: int | None = None,
) -> None:  # fmt: skip
    """In fp32 at least; a weight is rounded once."""
    numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    states = zip(exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales, strict=True)
    for row, (p, g, step, (m, m_scales, v, v_scales)) in enumerate(zip(params, grads, steps, states, strict=True)):
        count = int(step) if seed is not None else 0
        first = dequantize(m, m_scales, block_size, True, state_format)
        second = dequantize(v, v_scales, block_size, False, state_format)
        wide = p.to(first.dtype)
        wide = wide.clone() if wide is p else wide
        adamw_in_32_bits([wide], [g.to(first.dtype)], [first], [second], [step], None, **numbers)
        p.copy_(wide)
        for state, (x, codes, scales) in enumerate(((first, m, m_scales), (second, v, v_scales))):
            bits = None if seed is None else random_bits(p.numel(), seed, state, row, count, p.device)
            quantize(x, codes, scales, block_size, state == 0, state_format, bits)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Options: see ``workloads``; moments are drawn, then quantised."""
    block, format = w.option("block", 256), w.option("format", "dynamic")
    drawn = workloads.lists(w, g, device, {"exp_avg": False, "exp_avg_sq": True})
    made: dict[str, Any] = {"params": drawn["params"], "grads": drawn["grads"]}
    for name in ("exp_avg", "exp_avg_sq"):
        codes = [torch.empty_like(p, dtype=torch.uint8) for p in drawn["params"]]
        scales = [p.new_empty(blocks_of(p.numel(), block), dtype=torch.float32) for p in drawn["params"]]
        for x, code, scale in zip(drawn[name], codes, scales, strict=True):
            if x.device.type != "meta":
                quantize(x.float(), code, scale, block, name == "exp_avg", format)
        made |= {f"{name}_codes": codes, f"{name}_scales": scales}
    flags = {"maximize": w.option("maximize", False), "seed": 5 if w.option("stochastic") else None}
    steps = workloads.counts(w, device)
    return {**made, "steps": steps, **workloads.NUMBERS, **flags, "block_size": block, "state_format": format}


def cost(w: Workload, direction: str) -> Cost:
    """Beside weight and gradient a code and a share of a scale for each moment; a square root and a division."""
    n, size = workloads.elements(w), w.bytes_per_element
    moments = 2 * n + 8 * sum(blocks_of(torch.Size(s).numel(), w.option("block", 256)) for s in workloads.shapes(w))
    return Cost(2 * size * n + moments, size * n + moments, vector_flops=60 * n, special_ops=2 * n)


def _read(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """The reference that reads a list of states changed, and writes it where it is."""

    def wrong(**arguments: Any) -> None:
        read = [change(t) for t in arguments[name]]
        reference(**{**arguments, name: read})
        for mine, theirs in zip(arguments[name], read, strict=True):
            mine.copy_(theirs)

    return wrong


def _written(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """The reference that writes a list of states changed."""

    def wrong(**arguments: Any) -> None:
        reference(**arguments)
        for t in arguments[name]:
            t.copy_(change(t))

    return wrong


def _first_moment_by_the_unsigned_map(**arguments: Any) -> None:
    states, block, format = arguments["exp_avg_codes"], arguments["block_size"], arguments["state_format"]
    pairs = list(zip(states, arguments["exp_avg_scales"], strict=True))
    seen = [dequantize(*pair, block, True, format) for pair in pairs]
    for x, g in zip(seen, arguments["grads"], strict=True):
        x.lerp_((-g if arguments["maximize"] else g).to(x.dtype), 1 - arguments["betas"][0])
    reference(**arguments)
    for x, pair in zip(seen, pairs, strict=True):
        quantize(x.abs(), *pair, block, False, format)


MUTATES = ("params", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales", "steps")


def _ranks(w: Workload, t: Tensor) -> Tensor:
    """Codes of fp8 as whole numbers in the order of what they stand for, both zeros the same; what is no code as it is."""
    if t.dtype != torch.uint8 or w.option("format", "dynamic") != "fp8":
        return t
    size = (t & 127).short()
    return torch.where(t > 127, -size, size)


adamw_8bit = Operator(
    name="adamw_8bit",
    axes=workloads.AXES,
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        **{name: values for name, values in workloads.OPTIONS.items() if name != "states"},
        "block": BLOCKS,
        "format": STATE_FORMATS,
        "stochastic": (True, False),
    },
    mutates=MUTATES,
    # 3 %: nearest codes, as peers take them, are other ones beside powers of ten (dynamic_map); ours differ hardly anywhere
    tolerance=Tolerance(scale="tensor", ulps=4.0, neighbours=0.03, ranks=_ranks),
    workloads={
        **workloads.WORKLOADS,
        "verify": [
            *(workload(T=t, P=p) for t, p in ((1, 1), (3, 100))),
            workload(T=5, P=700, shapes="uneven"),
            workload(T=2, P=4096),
            workload(T=2, P=4097, block=128),
            workload(T=2, P=5003, block=2048),
            workload(T=3, P=4099, layout="unaligned"),
            workload(T=2, P=600, layout="transposed"),
            workload(T=3, P=500, maximize=True),
            workload(T=2, P=1000, values="nonfinite"),
            workload(T=2, P=4500, stochastic=True),
            workload(T=2, P=4500, format="fp8"),
            *(workload(T=2, P=700, format="fp8", **o) for o in ({"values": "nonfinite"}, {"stochastic": True})),
        ],
        "bench": [
            *(workload(t, **workloads.MODEL) for t in ("bf16", "fp32")),
            *(
                workload("bf16", **workloads.MODEL, **{o: v})
                for o, v in (("format", "fp8"), ("stochastic", True), ("block", 2048))
            ),
        ],
        "host": [workload("fp32", T=12, P=4096)],
        "compile": [
            *(workload(T=2, P=5000, **o) for o in ({}, {"format": "fp8"})),
            *(workload("bf16", T=2, P=5000, **o) for o in ({"stochastic": True}, {"block": 2048})),
        ],
    },
    mutants=[
        *workloads.mutants(reference, *MUTATES[1:5]),
        Mutant("scale of the wrong block", _read("exp_avg_scales", lambda scales: scales.flip(0))),
        Mutant("codes of the neighbour", _written("exp_avg_codes", lambda codes: codes.roll(1))),
        Mutant("codes read one off", _read("exp_avg_codes", lambda codes: codes.clamp_max(254) + 1)),
        Mutant("codes written one off", _written("exp_avg_sq_codes", lambda codes: codes.clamp_max(254) + 1)),
        Mutant("no bias correction", adam.uncorrected(changed(reference, seed=lambda seed: None))),
        Mutant("first moment by the unsigned map", _first_moment_by_the_unsigned_map),
        Mutant("betas swapped", changed(reference, betas=lambda betas: betas[::-1])),
        Mutant("another random number", changed(reference, seed=lambda seed: None if seed is None else seed + 1)),
        Mutant("always to the interval", changed(reference, seed=lambda seed: None)),
    ],
)


def check(a: Arguments) -> None:
    params, options = a.lists["params"], a.options
    block, format, seed = options["block_size"], options["state_format"], options["seed"]
    if block not in BLOCKS:
        raise ValueError(f"adamw_8bit: argument 'block_size' is {block!r}; expected {', '.join(map(str, BLOCKS))}")
    if format not in STATE_FORMATS:
        raise ValueError(f"adamw_8bit: argument 'state_format' is {format!r}; expected {' or '.join(STATE_FORMATS)}")
    whole = isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 2**63
    if seed is not None and not whole:
        raise ValueError(f"adamw_8bit: argument 'seed' is {seed!r:.40}; expected an int of 64 bits or None")
    for name in MUTATES[1:5]:
        coded = name.endswith("codes")
        tensors = (a.lists if coded else a.scales)[name]
        if len(tensors) != len(params):
            raise ValueError(f"adamw_8bit: argument '{name}' has {len(tensors)} tensors; expected {len(params)}")
        for i, (t, p) in enumerate(zip(tensors, params, strict=True)):
            scales = (torch.float32,) if p.dtype in FLOATS else (torch.float32, torch.float64)
            check_tensor("adamw_8bit", f"{name}[{i}]", t, (torch.uint8,) if coded else scales)
            wanted = p.shape if coded else torch.Size((blocks_of(p.numel(), block),))
            check_shape("adamw_8bit", f"{name}[{i}]", t, t.shape == wanted, f"{tuple(wanted)}")
            if t.device != p.device or (not coded and not t.is_contiguous()):
                raise ValueError(
                    f"adamw_8bit: argument '{name}[{i}]' is on {t.device}, with strides {t.stride()}; "
                    f"expected {p.device}, dense"
                )


step = dispatch.register(
    adamw_8bit, ADAM, ("exp_avg_codes", "exp_avg_sq_codes"), ("lr", "eps", "weight_decay"),
    scales=("exp_avg_scales", "exp_avg_sq_scales"), kernels=("triton", "cuda"), check_tensors=check,
    decoupled_weight_decay=True,
)  # fmt: skip


class Peer:
    """An optimizer of bitsandbytes or torchao for the weights of a call, over the same weights and the same codes (both count
    the values of the dynamic map from the least, as we do): made at the first call, cached as long as those weights live. The
    first call passes our counts and moments to the peer (``adopt``), and copies back moments that it has in another form."""

    def __init__(self, make: Callable[..., Any], adopt: Callable[..., tuple[Tensor, Tensor] | None]):
        self.make, self.adopt = make, adopt
        self.known = WeakIdKeyDictionary()

    def __call__(
        self, params: Tensors, grads: Tensors, steps: Tensors, maximize: bool, block_size: int, state_format: str,
        seed: int | None, **given: Any,
    ) -> None:  # fmt: skip
        if maximize or state_format != "dynamic" or seed is not None:
            raise Declined("minimises, by the dynamic map, without random numbers")
        if params[0] in self.known:
            optimizer, held = self.known[params[0]]
            for p, g in zip(held, grads, strict=True):
                p.grad = g
            optimizer.step()
            return
        held = [torch.nn.Parameter(p.detach()) for p in params]
        moments = zip(*(given.pop(name) for name in MUTATES[1:5]), strict=True)
        optimizer = self.make(held, given, block_size)
        wide = []
        for p, g, step, (m, m_scales, v, v_scales) in zip(held, grads, steps, moments, strict=True):
            p.grad = g
            both = (m, m_scales), (v, v_scales)
            owned = self.adopt(optimizer, p, step, *both)
            if owned is not None:
                for own, (codes, scales), signed in zip(owned, both, (True, False), strict=True):
                    own.copy_(dequantize(codes, scales, block_size, signed, "dynamic"))
                wide.append((owned, both))
        optimizer.step()
        for owned, both in wide:
            for own, (codes, scales), signed in zip(owned, both, (True, False), strict=True):
                quantize(own.float(), codes, scales, block_size, signed, "dynamic")
        for step in steps:
            step.add_(1)
        self.known[params[0]] = optimizer, held


def make_bitsandbytes(params: list[torch.nn.Parameter], options: dict[str, Any], block: int) -> Any:
    if block != 256:
        raise Declined("bitsandbytes has blocks of 256")
    return importlib.import_module("bitsandbytes.optim").AdamW8bit(params, **options, min_8bit_size=1)


def adopt_bitsandbytes(optimizer: Any, p: Tensor, step: Tensor, first: Moment, second: Moment) -> Moment | None:
    index = next(i for i, q in enumerate(optimizer.param_groups[0]["params"]) if q is p)
    optimizer.init_state(optimizer.param_groups[0], p, 0, index)
    optimizer.initialized = True
    state = optimizer.state[p]
    state["step"] = int(step)
    if state["state1"].dtype != torch.uint8:
        return state["state1"], state["state2"]
    state["state1"], state["absmax1"] = first
    state["state2"], state["absmax2"] = second
    return None


def make_torchao(params: list[torch.nn.Parameter], options: dict[str, Any], block: int) -> Any:
    return importlib.import_module("torchao.optim").AdamW8bit(params, **options, block_size=block)


def adopt_torchao(optimizer: Any, p: Tensor, step: Tensor, first: Moment, second: Moment) -> Moment | None:
    made = [optimizer._new_buffer(p, signed) for signed in (True, False)]
    optimizer.state[p].update(step=step.cpu().clone(), exp_avg=made[0], exp_avg_sq=made[1])
    if not hasattr(made[0], "codes"):
        return made[0], made[1]
    for owned, (codes, scales) in zip(made, (first, second), strict=True):
        owned.codes, owned.scale = codes, scales
    return None


bitsandbytes, torchao = Peer(make_bitsandbytes, adopt_bitsandbytes), Peer(make_torchao, adopt_torchao)
adamw_8bit.implementation("bitsandbytes", requires="bitsandbytes", devices=("cuda",))(bitsandbytes)
adamw_8bit.implementation("torchao", requires="torchao", devices=("cuda",))(torchao)


@adamw_8bit.function
def adamw_8bit_function(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avg_codes: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor], exp_avg_sq_codes: Sequence[Tensor], exp_avg_sq_scales: Sequence[Tensor],
    steps: Sequence[Tensor], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
    weight_decay: float = 1e-2, maximize: bool = False, block_size: int = 256, state_format: str = "dynamic",
    seed: int | None = None,
) -> None:  # fmt: skip
    """One step of AdamW in place, its moments in 8 bits, one launch for all tensors; :class:`weft.optim.AdamW8bit` is the
    optimizer.

    Args:
        exp_avg_codes: codes of the first moments, uint8, of the weights' shapes and strides: by the signed dynamic map, which
            counts its values from -0.993 to 1, or bits of e4m3.
        exp_avg_scales: [ceil(elements / block_size)] float32 each: the largest magnitude of each block of neighbours in memory.
        exp_avg_sq_codes: of the second moments: by the unsigned dynamic map, or e4m3 of the root.
        exp_avg_sq_scales: likewise.
        block_size: 128, 256, 512, 1024 or 2048.
        state_format: ``dynamic`` or ``fp8``.
        seed: codes are rounded up or down at random, so that their expectation is right; None: to the interval. All others: see
            ``weft.ops.adamw``.

    Returns:
        None: all lists but the gradients are changed in place. Arithmetic is fp32; results are rounded once.

    Raises:
        TypeError, ValueError: as ``weft.ops.adam``.

    Source: Dettmers, Lewis, Shleifer & Zettlemoyer 2021, arXiv 2110.02861; Loshchilov & Hutter 2019.
    """
    moments = exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales
    numbers = lr, betas, eps, weight_decay, maximize
    step(params, grads, *moments, steps, *numbers, block_size, state_format, seed)
