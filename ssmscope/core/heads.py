"""Kind of a model's head, and a classifier's own logits for every row of a padded batch."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from ssmscope.core.affine import is_plain
from ssmscope.core.encoding import last_positions
from ssmscope.core.intercept import observe, override_forward, twin
from ssmscope.errors import InputError

LogitsKind = Literal["next tokens", "classes", "labels", "numbers", "nothing"]
"""Kinds of logits: of next tokens or classes, of which one is right (their softmax are probabilities);
labels, of which any may be (the sigmoid of each); numbers, of a regression; or nothing, without a head."""


def gives(module: Any) -> LogitsKind:
    """Return the kind of a model's logits."""
    if hasattr(module, "gives"):
        return module.gives
    return given_by(module.config) if is_sequence_classifier(module) else "next tokens"


def role_of(model: Any) -> str:
    """Return the name of such a model: "a language model", "a classifier" or "a regression model"."""
    if model.gives == "numbers":
        return "a regression model"
    return "a classifier" if model.is_classifier else "a language model"


def is_sequence_classifier(module: Any) -> bool:
    """Return True if a model is a classifier of whole texts by its class's name, as transformers' are."""
    return type(module).__name__.endswith("ForSequenceClassification")


def given_by(config: Any) -> LogitsKind:
    """Return the kind of a classifier's logits; one output alone is a number, whose softmax would always be 1."""
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return "labels"
    return "numbers" if problem == "regression" or config.num_labels == 1 else "classes"


def reordered_names(model: Any) -> str:
    """Say that a model's own names of its classes are given in another order; empty if they are not."""
    given = getattr(model, "class_names", None)
    own = [str(model.config.id2label[at]) for at in range(len(given))] if given else []
    if given is None or list(given) == own or {*given} != {*own}:
        return ""
    return (
        f"the labels {','.join(given)} are {model.name}'s own names in another order; its logits are "
        f"{','.join(own)}: leave labels out unless its names are wrong"
    )


def check_class_names(module: Any, names: Any, model: str) -> None:
    """Raise InputError unless names are None, or a classifier's: as many as its outputs, texts that differ."""
    if names is None:
        return
    if gives(module) in ("next tokens", "nothing"):
        raise InputError(f"{model} is not a classifier and has no classes to name; leave labels=… out")
    if not all(isinstance(name, str) and name.strip() for name in names) or len({*names}) < len(names):
        raise InputError(f"labels are {', '.join(map(repr, names))}; give names that differ")
    if len(names) != module.config.num_labels:
        count = module.config.num_labels
        raise InputError(f"labels are {', '.join(names)}; {model} has {count} classes: give a name for each, in order")


def hidden_vectors(module: Any, **given: Tensor) -> Tensor:
    """Return the backbone's output that the head reads, (batch, length, width), in the caller's context."""
    if hasattr(module, "run_backbone"):
        return module.run_backbone(**given)[0]
    return module.base_model(**given, use_cache=False).last_hidden_state


def linear_head(module: Any) -> nn.Module | None:
    """Return the part that maps a backbone's output to logits, by its names in models; None without one."""
    found = [getattr(module, name, None) for name in ("head", "score")]
    return next((part for part in found if isinstance(part, nn.Module)), None) or module.get_output_embeddings()


class BackboneOutput:
    """Stand-in for a backbone's output: `last_hidden_state`, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def head_logits(module: Any, hidden: Tensor) -> Tensor:
    """Return a language model's own logits (…, vocabulary) for its head's input (…, width). The model's forward pass
    runs with the backbone's output replaced, so multipliers, caps and biases after the head count."""
    flat = hidden.reshape(1, -1, hidden.shape[-1])
    backbone = module.base_model
    if backbone is module:
        found = module.get_output_embeddings()(flat)
    else:
        ids = torch.zeros(flat.shape[:2], dtype=torch.long, device=flat.device)
        with override_forward([(backbone, lambda below, *args, **kwargs: BackboneOutput(flat))]):
            found = module(input_ids=ids, use_cache=False).logits
    return found.reshape(*hidden.shape[:-1], found.shape[-1]).to(hidden.device)


def own_logits(module: Any, arguments: dict[str, Tensor], at: Tensor | None) -> Tensor:
    """Return a model's own logits: (batch, classes), or a language model's everywhere or at one position of a row."""
    if gives(module) != "next tokens":
        return class_logits(module, arguments)
    if at is None:
        return module(**arguments, use_cache=False).logits
    known = module.get_output_embeddings()
    rows = torch.arange(len(at), device=at.device)
    whole = arguments["attention_mask"].shape

    def choose(head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args or args[0].shape[:2] != whole:
            return None
        where = args[0].device  # In a model over several devices it is not the input's.
        return (args[0][rows.to(where), at.to(where)].unsqueeze(1), *args[1:]), kwargs

    chosen = known is not None and is_plain(known, nn.Linear)  # Another head may count positions.
    with observe(before=[(known, choose)] if chosen else []):
        logits = module(**arguments, use_cache=False).logits
    return logits[rows, at] if logits.shape[1] == whole[1] else logits[:, 0]


def class_logits(module: Any, arguments: dict[str, Tensor]) -> Tensor:
    """Return a classifier's own logits (batch, classes), every row read at the last position of its `attention_mask`.
    transformers' heads look for the last token that is not the padding token of the configuration, and for embeddings
    read the last column. Here every position shows them the backbone's output at the row's last real one."""
    if not type(module).forward.__module__.startswith("transformers."):
        return module(**arguments).logits
    at = last_positions(arguments["attention_mask"])

    def read_at_last(_: nn.Module, output: Any) -> BackboneOutput:
        hidden = output[0]
        rows = torch.arange(len(at), device=hidden.device)
        return BackboneOutput(hidden[rows, at.to(hidden.device)].unsqueeze(1).expand_as(hidden))

    with observe(after=[(module.base_model, read_at_last)]):
        return _with_pad_token(module)(**arguments, use_cache=False).logits


def _with_pad_token(module: Any) -> Any:
    """Return the module, or a twin with a padding token: transformers' classifiers refuse several rows without."""
    if getattr(module.config.get_text_config(), "pad_token_id", None) is not None:
        return module
    found = twin(module)
    found.config = copy.deepcopy(module.config)
    found.config.pad_token_id = found.config.get_text_config().pad_token_id = 0
    return found
