"""Fit a classifier: the run, its plan, the loop, its checkpoints and the model card. Quick to import."""

from ssmscope.training.plan import ARCHITECTURES
from ssmscope.training.run import train_classifier

__all__ = ["ARCHITECTURES", "train_classifier"]
