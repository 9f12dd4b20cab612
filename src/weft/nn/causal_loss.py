"""The loss of a causal language model without its logits: ``forward`` of transformers' ``…ForCausalLM`` and of its head."""

import functools
from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.nn import huggingface

# B batch, S tokens, D width, V vocabulary
MARK = "_weft_part"  # of a module whose forward is replaced: its part
HEAD = "head"
USUAL = ("ForCausalLM", None)  # losses, by transformers' names


def head(self: Any, hidden: Tensor, labels: Tensor | None = None, **loss: Any) -> Tensor:
    """Of the ``lm_head``: logits [B, S, V] of hidden states [B, S, D]; or with labels the loss. It is called as a module, so
    that the hooks that gather a sharded weight run."""
    if labels is None:
        return torch.nn.functional.linear(hidden, self.weight, self.bias)
    found: Tensor = ops.linear_cross_entropy(hidden.flatten(0, -2), self.weight, labels, bias=self.bias, **loss)
    return found


def shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """[B, S], at each token the label of the next one."""
    return torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


@functools.cache
def with_fused_loss(cls: Any) -> Any:
    """``cls.forward``, which with labels gives the loss and no logits while the model trains; ``skip_logits=False`` asks for
    both, ``True`` for the loss alone in evaluation too."""
    from transformers.modeling_outputs import (
        CausalLMOutputWithPast,
    )  # not below: a compiler does not follow lazy modules

    theirs: Any = cls.forward

    @functools.wraps(theirs)
    def forward(
        self: Any, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, *more: Any,
        labels: Tensor | None = None, skip_logits: bool | None = None, **named: Any,
    ) -> Any:  # fmt: skip
        skip = self.training if skip_logits is None else skip_logits
        some = named.get("logits_to_keep", 0)
        if labels is None or not skip or more or isinstance(some, Tensor) or some or not _fusable(self):
            asked = named if labels is None else {**named, "labels": labels}
            return theirs(self, input_ids, attention_mask, position_ids, *more, **asked)
        named |= {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        return _with_loss(self, CausalLMOutputWithPast, labels, **named)

    return forward


def _fusable(model: Any) -> bool:
    """Whether the head is the one that was patched (an adapter may have wrapped it since), and the loss the usual one. By plain
    attributes, which every compiler follows."""
    ours = getattr(model.lm_head, MARK, None) == HEAD
    return ours and getattr(model, "_loss_function", None) is None and getattr(model, "loss_type", None) in USUAL


def _plain(config: Any, named: dict[str, Any]) -> bool:
    """Whether attention is weft's, and each token sees those before it."""
    given = ("attention_mask", "position_ids", "past_key_values", "cache", "token_type_ids", "mm_token_type_ids")
    usual = getattr(config, "is_causal", None) is not False and not getattr(
        config, "use_bidirectional_attention", False
    )
    return usual and config._attn_implementation == huggingface.NAMED and all(named.get(name) is None for name in given)


def _with_loss(
    model: Any, output: Any, labels: Tensor, *, return_dict: bool | None = None, logits_to_keep: int | None = 0,
    **named: Any,
) -> Any:  # fmt: skip
    if _plain(model.config, named):
        given = named.get("input_ids")
        named["attention_mask"] = huggingface.plain_causal(labels if given is None else given)
    outputs = model.model(**named, return_dict=True)
    hidden = outputs.last_hidden_state
    ignored = named.get("ignore_index", -100)
    targets = named.get("shift_labels")
    targets = (shifted(labels, ignored) if targets is None else targets).flatten().to(hidden.device)
    items = named.get("num_items_in_batch")
    loss = model.lm_head(
        hidden, labels=targets, ignore_index=ignored, soft_cap=getattr(model.config, "final_logit_softcapping", None),
        reduction="mean" if items is None else "sum",
    )  # fmt: skip
    if items is not None:
        loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
    others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
    found = output(loss=loss, logits=None, **others)
    as_tuple = not (model.config.return_dict if return_dict is None else return_dict)
    return found.to_tuple() if as_tuple else found
