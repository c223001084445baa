"""Model that a run trains: new, or with the weights of a trained one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from ssmscope.data.pixels import PixelData
from ssmscope.data.tokens import SequenceData, TokenData
from ssmscope.errors import InputError
from ssmscope.loading.load import load
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.zoo.baleen import convert
from ssmscope.zoo.instructions import InstructionData, spoken
from ssmscope.zoo.selective import SelectiveSSMForSequenceClassification
from ssmscope.zoo.tokenizers import train_byte_pairs, train_tokenizer
from ssmscope.zoo.training.architectures import GATE_OPTIONS, Tokens, named

STEPS = {"standard": (0.001, 0.1), "spread": (0.05, 0.5)}
RATES = (0.02, 0.5)
"""Initial ranges of Δ and, with `spread`, of |A|: memories of 1 / (Δ |A|) = 4 to 1,000 tokens.

With the standard ones (Mamba's; |A| from 1) the state initially adds about one per cent to a layer's output, and a
model that is regularised for a small set of texts stays at chance for several epochs.
"""


def build(options: Mapping[str, Any], train: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return the tokenizer and the model to train; raise InputError if `init_from` cannot become the architecture."""
    source = load(str(options["init_from"])) if options["init_from"] is not None else None
    if tokenizer is None and options["kind"] in ("text", "instructions"):
        tokenizer = _text_tokenizer(options, train, source)
    tokens = _tokens(train, tokenizer)
    if isinstance(train, (TokenData, InstructionData)):
        module = language_model(options, tokens, source)
    else:
        module = _classifier(options, train, tokens, source)
    if source is None:
        _initialize(module, options)
    return tokenizer, module


def _text_tokenizer(options: Mapping[str, Any], train: Any, source: Any) -> Any:
    chosen = {"vocabulary": options["vocabulary"], "lowercase": options["lowercase"]}
    if source is None and isinstance(train, InstructionData):
        return train_byte_pairs(spoken(train), **chosen)
    if source is None:
        return train_tokenizer(train.texts, **chosen, max_length=options["max_length"])
    if source.tokenizer is None:
        raise InputError(f"{source.name} has no tokenizer; init_from needs a model that reads text")
    return source.tokenizer


def _tokens(train: Any, tokenizer: Any) -> Tokens:
    if isinstance(train, PixelData):
        return Tokens(1)  # Only the class token is in the vocabulary.
    end = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.eos_token_id
    return Tokens(len(tokenizer), tokenizer.pad_token_id or 0, end or 0)


def _configuration(options: Mapping[str, Any], tokens: Tokens) -> Any:
    settled = {**options, "steps": STEPS[options["decays"] or "standard"]}
    return named(options["architecture"]).configure(settled, tokens)


def language_model(options: Mapping[str, Any], tokens: Tokens, source: Any) -> Any:
    from transformers import AutoModelForCausalLM

    if source is None:
        return AutoModelForCausalLM.from_config(_configuration(options, tokens))
    if source.is_classifier or source.vocabulary < tokens.number:
        what = "is a classifier" if source.is_classifier else f"knows {source.vocabulary} tokens of {tokens.number}"
        raise InputError(f"{source.name} {what}; init_from needs a language model of the same tokens")
    return _converted(source, source.module, options)


def _classifier(options: Mapping[str, Any], train: Any, tokens: Tokens, source: Any) -> Any:
    names = train.label_names
    labels: dict[str, Any] = {"num_labels": len(names), "id2label": dict(enumerate(names))}
    labels["label2id"] = {name: i for i, name in enumerate(names)}
    if options["architecture"] == "selective":
        return _selective(options, train, tokens, labels, source)
    if source is None:
        backbone, configuration = None, _configuration(options, tokens)
    else:
        _check_input(source, train, tokens)
        backbone = _converted(source, getattr(source.module, "backbone", None), options)
        configuration = backbone.config
    of_pixels = isinstance(train, PixelData)
    pixels: dict[str, Any] = {"channels": train.channels, "image_size": list(train.shape)} if of_pixels else {}
    dropout = options["dropout"] or 0.0
    module = SSMForSequenceClassification(SSMClassifierConfig(configuration, dropout=dropout, **pixels, **labels))
    if backbone is not None:
        module.backbone.load_state_dict(backbone.state_dict())
        same = source.is_classifier and source.labels == list(names)
        for part in ("head", *["embed"] * of_pixels) if same else ():
            getattr(module, part).load_state_dict(getattr(source.module, part).state_dict())
    return module


def _check_input(source: Any, train: Any, tokens: Tokens) -> None:
    """Raise InputError if the source reads other input. Texts are read by the source's own tokenizer."""
    if isinstance(train, PixelData) and source.channels != train.channels:
        raise InputError(
            f"{source.name} reads no pixels of {train.channels} channels; init_from needs a classifier of them"
        )
    if isinstance(train, SequenceData) and source.vocabulary != tokens.number:
        raise InputError(
            f"{source.name} knows {source.vocabulary} tokens, and {train.name} has {tokens.number}; init_from needs a "
            "model of the same tokens"
        )


def _selective(options: Mapping[str, Any], train: Any, tokens: Tokens, labels: Mapping[str, Any], source: Any) -> Any:
    if source is not None:
        if not isinstance(source.module, SelectiveSSMForSequenceClassification):
            raise InputError(f"{source.name} is not a classifier with a selective SSM; init_from needs one")
        _check_input(source, train, tokens)
        if source.labels != list(labels["label2id"]):
            raise InputError(
                f"{source.name} has the classes {', '.join(source.labels)}, not {', '.join(labels['label2id'])}; "
                "init_from needs a selective SSM of the same classes"
            )
        return source.module
    configuration = _configuration(options, tokens)
    configuration.binary = labels["num_labels"] == 2
    for name in ("id2label", "label2id"):
        setattr(configuration, name, labels[name])
    return SelectiveSSMForSequenceClassification(configuration)


def _converted(source: Any, module: Any, options: Mapping[str, Any]) -> Any:
    """Return the backbone or language model of a loaded model as the chosen architecture, without new parameters."""
    name, config = options["architecture"], getattr(module, "config", None)
    architecture, kind = named(name), getattr(config, "model_type", None)
    chosen = {option: options[option] for option in GATE_OPTIONS if options[option] is not None}
    if architecture.gate is not None and kind in ("mamba", "mamba2"):
        return convert(module, architecture.gate, **chosen)
    same_gate = architecture.gate is not None and getattr(config, "gate", None) == architecture.gate
    if kind in architecture.kinds or (same_gate and not chosen):
        return module
    raise InputError(
        f"{source.name} is a {kind or type(source.module).__name__}, which cannot become {name}; a Mamba or "
        "Mamba-2 can become a Baleen, and every architecture can be trained further with its own gate as it is"
    )


def _initialize(module: Any, options: Mapping[str, Any]) -> None:
    """Draw Δ of a hybrid's heads log-uniformly like Mamba-2, because Bamba's start at softplus(1) and forget within a
    step; with `spread`, put |A| of every layer in equal ratios between `RATES`, over states or heads; and draw all of a
    selective SSM but A from N(0, 1) with `normal`."""
    low, high = map(math.log, STEPS[options["decays"] or "standard"])
    for name, parameter in module.named_parameters():
        if name.endswith("dt_bias") and options["architecture"] == "hybrid":
            drawn = torch.exp(low + (high - low) * torch.rand_like(parameter))
            parameter.data.copy_(drawn + torch.log(-torch.expm1(-drawn)))  # This is the inverse of softplus.
        elif options["start"] == "normal" and not name.endswith("ssm.A"):
            torch.nn.init.normal_(parameter)
        elif name.endswith("A_log") and options["decays"] == "spread":
            rates = torch.linspace(math.log(RATES[0]), math.log(RATES[1]), parameter.shape[-1])
            parameter.data.copy_(rates.expand_as(parameter))
