"""Optimizers over the one-launch engine of ``weft.operators.optimizer``, in place of those of ``torch.optim``."""

from weft.operators.optimizer.rule import Rule
from weft.optim.adam import Adam, AdamW
from weft.optim.adam_8bit import Adam8bit, AdamW8bit
from weft.optim.lion import Lion
from weft.optim.muon import Muon, MuonW
from weft.optim.optimizer import OneLaunch
from weft.optim.overlap import Overlap
from weft.optim.sgd import SGD

__all__ = ["SGD", "Adam", "Adam8bit", "AdamW", "AdamW8bit", "Lion", "Muon", "MuonW", "OneLaunch", "Overlap", "Rule"]
