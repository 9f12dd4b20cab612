"""Attention of Hugging Face's models by ``weft.ops.attention``: ``attn_implementation="weft"``.

A model first asks for a mask, for all its layers at once, then calls attention in each. transformers describes a mask as a
function of the positions of a query and a key. Of the usual ones (causal, sliding window, all keys, packed sequences) no tensor
of Sq x Sk is made: attention gets a :class:`Visible` in the mask's place.
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.nn.visible import Visible
from weft.operators.call import traced

# B batch, H heads of queries, G heads of keys and values, Sq queries, Sk keys, D head dim
NAME = "weft.nn.huggingface"
NAMED = "weft"  # as registered with transformers by ``weft.patch``
INSTALL = "pip install 'weft[transformers]'"


def register(name: str = NAMED) -> None:
    """Makes ``attn_implementation=name`` known to transformers (4.57 or newer; before 5.0, masks are tensors).

    Then ``AutoModelForCausalLM.from_pretrained(…, attn_implementation="weft")``, or of a model that there is
    ``model.set_attn_implementation("weft")``. Models that do not call transformers' ``AttentionInterface`` refuse it.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    except ImportError as error:
        raise ModuleNotFoundError(f"{NAME}: no transformers of 4.57 or newer ({error}); {INSTALL}") from None
    AttentionInterface.register(name, attention)
    described = "q_length" in inspect.signature(masking_utils.sdpa_mask).parameters  # since 5.0
    AttentionMaskInterface.register(name, _mask_of(masking_utils) if described else masking_utils.sdpa_mask)


@functools.cache
def _mask_of(theirs: Any) -> Callable[..., Tensor | None]:
    return functools.partial(mask, theirs)  # which does not import it: a compiler does not follow lazy modules


# ---- the mask ----------------------------------------------------------------------------------------------------------------


def mask(
    theirs: Any, batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True, local_size: int | None = None, use_vmap: bool = False, device: Any = "cpu", **rest: Any,
) -> Tensor | None:  # fmt: skip
    """As transformers' ``AttentionMaskInterface`` wants it: a :class:`Visible` where the pattern is known and the last query
    has the position of the last key; else a boolean tensor [B, 1, Sq, Sk], true is seen, as while a compiler traces. ``theirs``
    is transformers' module of masks."""
    if mask_function is None:  # PyTorch 2.11's compiler cannot say whether a function is true
        mask_function = theirs.causal_mask_function
    tracing = torch.compiler.is_compiling() or (attention_mask is not None and traced(attention_mask))
    last_of_last = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    found, shape = None, (batch_size, 1, q_length, kv_length)
    if last_of_last and not use_vmap and not tracing:
        found = _known(theirs, mask_function, local_size, shape, device)
    elif not kv_offset and not use_vmap and not tracing and same(mask_function, theirs.causal_mask_function):
        found = Visible(shape, device, causal=True, length=q_offset + q_length)  # a static cache
    if found is None:
        dense: Tensor | None = theirs.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, use_vmap=use_vmap, device=device,
            allow_is_causal_skip=tracing and allow_is_causal_skip and q_length == kv_length, local_size=local_size,
        )  # fmt: skip
        return dense
    if attention_mask is not None:
        padding: Any = theirs.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        padding = padding[:, kv_offset : kv_offset + kv_length]
        if found.length is not None:
            padding = padding | (torch.arange(kv_length, device=padding.device) >= found.length)
        if not padding.all():  # waits for the device once in a forward pass, as PyTorch's attention does
            found.padding = padding[:, None, None]
    return found


def plain_causal(like: Tensor) -> Tensor:
    """What stands for a mask in a model whose attention is weft's where nothing is padded, packed or cached: transformers takes
    a mask of four dimensions as it is. Otherwise it asks the device in each forward pass whether positions are those of packed
    sequences, and while a compiler traces, where it cannot ask, makes a mask of Sq x Sk."""
    return torch.empty((1, 1, 0, 0), dtype=torch.bool, device=like.device)


def _known(
    theirs: Any, function: Callable[..., Any], local_size: int | None, shape: tuple[int, ...], device: Any
) -> Visible | None:
    """The pattern that a function of transformers' says; None if it is none of ours."""
    if same(function, theirs.bidirectional_mask_function):
        return Visible(shape, device, causal=False)
    patterns: dict[tuple[int, None] | None, Any] = {None: theirs.causal_mask_function}
    if local_size is not None:
        patterns[local_size - 1, None] = theirs.sliding_window_causal_mask_function(local_size)
    for window, causal in patterns.items():
        if same(function, causal):
            return Visible(shape, device, causal=True, window=window)
        tensors: list[Tensor] = []  # of positions, then of the sequences' numbers
        of_positions = causal
        if hasattr(theirs, "remap_positions_for_packed_sequence"):  # since 5.23
            of_positions = theirs.remap_positions_for_packed_sequence(causal, torch.empty(0))
        packed = theirs.and_masks(of_positions, theirs.packed_sequence_mask_function(torch.empty(0)))
        if same(function, packed, tensors):
            numbers = tensors[-1]
            new = torch.ones_like(numbers, dtype=torch.bool)
            new[:, 1:] = numbers.diff(dim=-1) != 0
            begins = new.flatten().nonzero().flatten().to(torch.int32)
            sequences = torch.nn.functional.pad(begins, (0, 1), value=numbers.numel())
            return Visible(shape, device, causal=True, window=window, sequences=sequences)
    return None


def same(one: Any, other: Any, tensors: list[Tensor] | None = None) -> bool:
    """Whether two values are equal, functions where they are of one code and enclose equal values. Tensors that functions
    enclose are equal where there is a list for ``one``'s, in the order in which they are met."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if tensors is None or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return one is other
        tensors.append(one)
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(same(a, b, tensors) for a, b in zip(one, other, strict=True))
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        enclosed = (tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, other))
        return one.__code__ is other.__code__ and same(next(enclosed), next(enclosed), tensors)
    return bool(one == other)


# ---- attention ---------------------------------------------------------------------------------------------------------------


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None, **rest: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As transformers' ``AttentionInterface`` wants it: query [B, H, Sq, D], key and value [B, G, Sk, D] -> [B, Sq, H, D].

    Raises:
        ValueError: weights are asked for.
    """
    if rest.get("output_attentions"):
        raise ValueError(
            f"{NAME}: output_attentions is True; expected False, or attn_implementation='eager': weights are not stored"
        )
    call: dict[str, Any] = {"scale": scaling, "softcap": softcap, "dropout": dropout}
    call["sinks"] = None if s_aux is None else s_aux.to(query.dtype)
    if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[3] == 0:  # plain_causal
        attention_mask = None
    if attention_mask is None:  # of a module that makes none, as FlashAttention has it; or while a compiler traces
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if query.shape[2] == 1:  # asked in a branch: a compiler's number of queries may be a symbol
            causal = False
        call["causal"] = causal = bool(causal)
        call["window"] = (sliding_window - 1, None) if causal and sliding_window is not None else None
    bias = position_bias
    if isinstance(attention_mask, Visible):
        more = attention_mask.padding is not None or bias is not None  # which packed sequences have no room for
        length, decodes = attention_mask.length, not more and _decodes(query, key, value, dropout)
        if (more and attention_mask.sequences is not None) or (length is not None and not decodes):
            attention_mask = attention_mask.dense()
    if isinstance(attention_mask, Visible):
        call |= {"causal": attention_mask.causal, "window": attention_mask.window, "mask": attention_mask.padding}
        if attention_mask.sequences is not None:
            return _of_sequences(query, key, value, attention_mask.sequences, call), None
        if decodes:
            named = {name: argument for name, argument in call.items() if name not in ("dropout", "mask")}
            if length is not None:
                number = torch.as_tensor(length, device=query.device).to(torch.int32)
                named["lengths"] = number.reshape(1).repeat(query.shape[0])
            o: Tensor = ops.decode_attention(query, key, value, **named)
            return o.transpose(1, 2).contiguous(), None
    elif attention_mask is not None and attention_mask.dtype == torch.bool:
        call["mask"] = attention_mask[..., : key.shape[2]]
    elif attention_mask is not None:
        added = attention_mask[..., : key.shape[2]]
        bias = added if bias is None else bias + added
    if bias is not None:
        call["bias"] = bias if bias.dtype in (query.dtype, torch.float32) else bias.to(query.dtype)
    o = ops.attention(query, key, value, **call)
    return o.transpose(1, 2).contiguous(), None


def _decodes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether these are few new queries at the end of a cache, with no gradient: work that is split over the keys."""
    gradients = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    dims = all(16 <= t.shape[3] <= 256 for t in (query, value))
    return query.shape[2] <= 8 and key.shape[2] > query.shape[2] and dims and not dropout and not gradients


def _of_sequences(query: Tensor, key: Tensor, value: Tensor, sequences: Tensor, call: dict[str, Any]) -> Tensor:
    """Packed sequences of a batch, as one row of tokens."""
    batch = query.shape[0]
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # [B S, heads, D]
    call = {name: argument for name, argument in call.items() if name != "mask"}
    o: Tensor = ops.attention(q, k, v, cu_seqlens_q=sequences, cu_seqlens_k=sequences, **call)
    return o.unflatten(0, (batch, -1))
