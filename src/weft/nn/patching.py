"""``weft.patch(model)``: a Hugging Face model computes with weft's operators, until ``weft.unpatch(model)``."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from weft.definition import UnknownName
from weft.nn import causal_loss, huggingface
from weft.nn.causal_loss import MARK
from weft.nn.families import FAMILIES, PARTS, forward_of, part_of

NAME = "weft.patch"
BY = {  # part: what computes it
    "attention": "attention", "rotary": "rotary_embedding", "rms_norm": "rms_norm", "mlp": "swiglu, geglu",
    "residual": "add_rms_norm", "loss": "linear_cross_entropy",
}  # fmt: skip
BEFORE = "_weft_attention_before"  # of a model: its attention implementation


@dataclass(frozen=True)
class Line:
    """Of the table: so many modules of a class, and by what operators they are computed, or why by none."""

    part: str
    cls: str
    modules: int
    note: str


@dataclass(frozen=True)
class Patch:
    """What ``weft.patch`` did to ``model``: ``str()`` of it is a table."""

    model: torch.nn.Module
    replaced: tuple[Line, ...]
    left: tuple[Line, ...]

    def undo(self) -> None:
        """As ``weft.unpatch(model)``."""
        unpatch(self.model)

    def __str__(self) -> str:
        lines = [("replaced", line) for line in self.replaced] + [("left alone", line) for line in self.left]
        cells = [(how, line.part, f"{line.modules} {line.cls}", line.note) for how, line in lines]
        if not cells:
            return f"{NAME}: nothing in {type(self.model).__name__} that weft knows"
        widths = [max(len(row[i]) for row in cells) for i in range(3)]
        return "\n".join("  ".join((*map(str.ljust, row[:3], widths), row[3])) for row in cells)


def patch(model: torch.nn.Module, *, skip: Collection[str] = ()) -> Patch:
    """Makes a model of transformers (Llama, Qwen 2 and 3, Mistral, Gemma 1 to 3, Phi 3) compute with weft's operators.

    Replaced are attention, the rotary embedding, RMSNorm, the gated activation and, while the model trains, logits and loss:
    ``forward`` with labels returns the loss of ``linear_cross_entropy`` and ``logits=None``, unless it is called with
    ``skip_logits=False`` (in evaluation it returns both, unless with ``skip_logits=True``). Parameters, ``state_dict``, classes
    and other models are not changed. Patch before ``torch.compile``, FSDP and adapters (PEFT); a model that was patched already
    is patched anew.

    Args:
        model: a model of transformers, or a module that holds some.
        skip: parts to leave alone: ``attention``, ``rotary``, ``rms_norm``, ``mlp``, ``residual``, ``loss``.

    Returns:
        What was replaced, and what was left alone and why.

    Raises:
        TypeError: not a module.
        UnknownName: a part in ``skip`` that there is not.
        ModuleNotFoundError: transformers is not installed.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{NAME}: argument 'model' is {type(model).__name__}; expected a torch.nn.Module")
    for part in skip:
        if part not in BY:
            raise UnknownName("part", part, BY)
    huggingface.register()
    unpatch(model)
    replaced: Counter[tuple[str, str, str]] = Counter()
    left: Counter[tuple[str, str, str]] = Counter()
    for module in model.modules():
        cls = type(module).__name__
        known = part_of(module)
        if known is None:
            if (why := _unknown(module)) is not None:
                left[why] += 1
            continue
        family, part = known
        why_not = "skipped" if part in skip else _replace(module, family, part)
        if why_not:
            left[part, cls, why_not] += 1
        else:
            replaced[part, cls, f"weft.ops: {BY[part]}"] += 1
    for one in _outermost(model):
        layers = [type(m).__name__ for m in one.modules() if (part_of(m) or ("", ""))[1] == "rotary"]
        if not layers:
            continue
        if why_not := "skipped" if "attention" in skip else _replace_attention(one):
            left["attention", layers[0], why_not] += len(layers)
        else:
            replaced["attention", layers[0], f"weft.ops: {BY['attention']}"] += len(layers)
    return Patch(model, _lines(replaced), _lines(left))


def unpatch(model: torch.nn.Module) -> None:
    """Undoes ``weft.patch(model)``; nothing for a model that is not patched.

    Raises:
        RuntimeError: another library replaced a module's ``forward`` after weft did; nothing is undone then.
    """
    marked = [(name, module) for name, module in model.named_modules() if MARK in vars(module)]
    for name, module in marked:
        if not _ours(module):
            raise RuntimeError(
                f"weft.unpatch: forward of '{name or type(module).__name__}' was replaced after weft.patch; expected weft's "
                "own: undo that first (accelerate: accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
            )
    for _, module in marked:
        del module.forward
        delattr(module, MARK)
    for module in model.modules():
        if BEFORE in vars(module):
            before: Any = vars(module).pop(BEFORE)
            if module.config._attn_implementation == huggingface.NAMED:  # type: ignore[union-attr]
                module.set_attn_implementation(before)  # type: ignore[operator]


def _lines(found: Counter[tuple[str, str, str]]) -> tuple[Line, ...]:
    return tuple(Line(part, cls, modules, note) for (part, cls, note), modules in found.items())


# ---- one module --------------------------------------------------------------------------------------------------------------


def _replace(module: Any, family: str, part: str) -> str:
    """Gives a module its new ``forward``; why not, if not."""
    if "forward" in vars(module):
        return "its forward was replaced by another library"
    if part != "loss":
        new = forward_of(module, family, part)
        if isinstance(new, str):
            return new
        _set(module, new, part)
        return ""
    output = module.lm_head
    if type(output) is not torch.nn.Linear or "forward" in vars(output):
        return f"its lm_head is {type(output).__name__}; expected a torch.nn.Linear as it was made"
    cls: Any = type(module)
    _set(module, causal_loss.with_fused_loss(cls), part)
    _set(output, causal_loss.head, causal_loss.HEAD)
    return ""


def _set(module: Any, forward: Any, part: str) -> None:
    setattr(module, MARK, part)
    module.forward = MethodType(forward, module)
    forward.of_weft = True


def _ours(module: torch.nn.Module) -> bool:
    return getattr(getattr(vars(module).get("forward"), "__func__", None), "of_weft", False)


def _replace_attention(model: Any) -> str:
    before = model.config._attn_implementation
    model.set_attn_implementation(huggingface.NAMED)
    if model.config._attn_implementation != huggingface.NAMED:
        return "transformers does not let this model choose its attention"
    vars(model)[BEFORE] = before
    return ""


def _outermost(module: torch.nn.Module) -> Iterator[Any]:
    """The models of transformers in a module that are in no other one."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _unknown(module: torch.nn.Module) -> tuple[str, str, str] | None:
    """A line about a part of a model that is of no known family."""
    cls = type(module)
    if not cls.__module__.startswith("transformers.models."):
        return None
    family = cls.__module__.split(".")[2]
    part = next((part for end, part in PARTS.items() if cls.__name__.endswith(end)), None)
    if part is None and cls.__name__.endswith("ForConditionalGeneration"):
        part = "loss"
    if part is None:
        return None
    known = "no such part of the family is known" if family in FAMILIES else f"not of {', '.join(FAMILIES)}"
    return part, cls.__name__, known
