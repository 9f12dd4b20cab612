"""Training jobs. ``weft.train.train`` is a plain loop that a lesson can quote; ``weft.train.loop`` that of ``weft train``."""

from weft.train.digits import TrainingRun, train

__all__ = ["TrainingRun", "train"]
