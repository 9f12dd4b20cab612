"""Optimizers over the multi-tensor launch of ``weft.operators.optimizer``, in place of those of ``torch.optim``."""

from weft.operators.optimizer.rules import Rule
from weft.optim.adam import Adam, AdamW
from weft.optim.adam_8bit import Adam8bit, AdamW8bit
from weft.optim.lion import Lion
from weft.optim.muon import Muon, MuonW
from weft.optim.muon_groups import muon_groups
from weft.optim.optimizer import OneLaunch, Overlap
from weft.optim.sgd import SGD

__all__ = [
    "SGD", "Adam", "Adam8bit", "AdamW", "AdamW8bit", "Lion", "Muon", "MuonW", "OneLaunch", "Overlap", "Rule", "muon_groups",
]  # fmt: skip
