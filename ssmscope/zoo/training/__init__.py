"""Training of a model on a task: data, recipes, the loop, checkpoints and the model card. Quick to import."""

from ssmscope.zoo.training.architectures import ARCHITECTURES
from ssmscope.zoo.training.run import train_model

__all__ = ["ARCHITECTURES", "train_model"]
