"""Which of a model's parameters Muon steps and which AdamW does."""

import re
from typing import Any

from torch import nn

# Names of output layers in the usual models: not below a numbered layer, as encoder.layer.0.output is.
HEADS = r"^(?!.*\.\d+\.)(.*\.)?(lm_head|embed_out|output|head|heads|classifier|score|fc_out|logits)$"


def muon_groups(model: nn.Module, *, heads: str = HEADS, **adamw: Any) -> list[dict[str, Any]]:
    """A model's parameters as two groups for :class:`weft.optim.Muon`: the matrices of its hidden layers, and for AdamW the
    embeddings, the output layers, and what is no matrix, as its authors recommend.

    Args:
        model: any module. A parameter that several modules share is in one group once.
        heads: regular expression of the names of output layers; Hugging Face's ``get_output_embeddings`` is asked too.
        adamw: options of AdamW's group: ``lr``, ``weight_decay``, ``adamw_betas``, ``adamw_eps``.

    Returns:
        Groups of (name, parameter), the names as ``model.named_parameters()`` has them; one group where the other is empty.

    Raises:
        ValueError: a model without parameters that require gradients.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    ends = {id(p) for module in (*_outputs(model, heads), *_embeddings(model)) for p in module.parameters()}
    muon: list[Any] = []
    others: list[Any] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (muon if p.ndim >= 2 and id(p) not in ends else others).append((name, p))
    if not muon and not others:
        raise ValueError("muon_groups: the model has no parameters that require gradients")
    groups = {"params": muon, "use_muon": True}, {"params": others, "use_muon": False, **adamw}
    return [group for group in groups if group["params"]]


def _embeddings(model: nn.Module) -> list[nn.Module]:
    """Modules that are embeddings, by their class or its name (as ``VocabParallelEmbedding``)."""
    return [
        m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) or "Embedding" in type(m).__name__
    ]


def _outputs(model: nn.Module, heads: str) -> list[nn.Module]:
    found = [m for name, m in model.named_modules() if re.search(heads, name)]
    output = getattr(model, "get_output_embeddings", lambda: None)()
    return found if output is None else [*found, output]
