"""``Adam8bit`` and ``AdamW8bit``: moments in 8 bits each, block by block."""

from typing import Any

import torch
from torch import Tensor

from weft.operators.optimizer.blockwise import BLOCKS, STATE_FORMATS, quantize, random_bits
from weft.operators.optimizer.rules import ADAM, Options
from weft.optim import adam, state
from weft.optim.adam import Adam, DecoupledDecay
from weft.optim.state import local

NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
CODE_ROUNDINGS = ("nearest", "stochastic")


def plain(params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]) -> None:
    """Parameters that the kernels do not take: codes to moments, PyTorch's function in fp32, and back."""
    mine = [local(p) for p in params]
    wide = [p.float() if p.itemsize < 4 else p for p in mine]
    counts = [int(s["step"]) for s in states]
    moments = [
        {n: state.moment(s, n, group, ADAM) if f"{n}_codes" in s else local(s[n]) for n in ADAM.states(group)}
        for s in states
    ]
    own = [{**m, "step": s["step"]} for m, s in zip(moments, states, strict=True)]
    adam.plain(wide, [local(g).to(p.dtype) for g, p in zip(grads, wide, strict=True)], own, group)
    for row, (p, w, m, s) in enumerate(zip(mine, wide, moments, states, strict=True)):
        if w is not p:
            p.copy_(w)
        if p is not params[row]:
            torch.autograd.graph.increment_version(params[row])  # a DTensor does not notice that its shard was written
        for number, (name, x) in enumerate(m.items()):
            if f"{name}_codes" not in s:
                continue
            bits = None
            if group["code_rounding"] == "stochastic":
                bits = random_bits(p.numel(), group["seed"], number, row, counts[row], p.device)
            code, scales = local(s[f"{name}_codes"]), s[f"{name}_scales"]
            quantize(x, code, scales, group["block_size"], number == 0, group["state_format"], bits)


class Adam8bit(Adam):
    """Adam whose moments take 8 bits each (Dettmers et al. 2021), with one fp32 scale for each block of neighbours in memory.

    Args:
        block_size: elements of a block: 128, 256, 512, 1024 or 2048.
        state_format: ``dynamic`` (the dynamic map, signed for the first moment, unsigned for the second) or ``fp8`` (e4m3,
            of the second moment the root).
        min_8bit_size: smaller tensors have moments of ``state_dtype``, here ``torch.float32`` unless said otherwise.
        code_rounding: ``nearest``, or ``stochastic`` (up or down at random so that the expectation is right, from ``seed``).
        params, lr, betas, eps, weight_decay, amsgrad, options: see :class:`weft.optim.Adam`.

    ``load_state_dict`` takes what ``torch.optim.Adam`` has saved too, and ``torch_state_dict`` gives the like.

    Raises:
        ValueError: options out of range.

    Source: Dettmers, Lewis, Shleifer & Zettlemoyer 2021, arXiv 2110.02861.
    """

    plain = staticmethod(plain)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        block_size: int = 256,
        state_format: str = "dynamic",
        min_8bit_size: int = 4096,
        code_rounding: str = "nearest",
        **options: Any,
    ) -> None:
        self._own = {
            "block_size": block_size,
            "state_format": state_format,
            "min_8bit_size": min_8bit_size,
            "code_rounding": code_rounding,
        }
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **{"state_dtype": torch.float32, **options})

    def own_defaults(self) -> dict[str, Any]:
        return self._own

    def check(self, options: Options) -> None:
        super().check(options)
        for name, known in (
            ("block_size", BLOCKS),
            ("state_format", STATE_FORMATS),
            ("code_rounding", CODE_ROUNDINGS),
        ):
            if options[name] not in known or type(options[name]) is not type(known[0]):  # 256.0 is no size
                raise ValueError(f"Invalid {name}: {options[name]!r}; expected {', '.join(map(str, known))}")
        least = options["min_8bit_size"]
        if isinstance(least, bool) or not isinstance(least, (int, float)) or not least >= 0:
            raise ValueError(f"Invalid min_8bit_size: {least!r:.40}; expected a number of 0 or more")
        if options["differentiable"]:
            raise ValueError("codes of 8 bits are not differentiable; expected differentiable=False")

    def torch_state_dict(self) -> dict[str, Any]:
        """:meth:`state_dict` as ``torch.optim``'s optimizer has it: moments of 32 bits in place of codes and scales, and
        groups without the options of codes.

        Raises:
            ValueError: ``block_size`` or ``state_format`` of a group is no longer that of its states.
        """
        for group in self.param_groups:
            for p in group["params"]:
                self._formats.check(p, self.state.get(p, {}), group)
        packed = self.state_dict()
        for group in packed["param_groups"]:
            for i in group["params"]:
                saved = packed["state"].get(i, {})
                for name in NAMES:
                    if f"{name}_codes" in saved:
                        saved[name] = state.moment(saved, name, group, ADAM)
                        del saved[f"{name}_codes"], saved[f"{name}_scales"]
        packed["param_groups"] = [state.without_code_options(group) for group in packed["param_groups"]]
        return packed


class AdamW8bit(DecoupledDecay, Adam8bit):
    """AdamW whose moments take 8 bits each: see :class:`Adam8bit`.

    Args:
        weight_decay: lr times that is taken from the weight.
    """
