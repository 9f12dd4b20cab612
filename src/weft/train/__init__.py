"""Training jobs: plain loops that a lesson can quote, each returning what it measured."""

from weft.train.digits import TrainingRun, train

__all__ = ["TrainingRun", "train"]
