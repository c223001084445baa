"""Fit a state-space classifier to labelled texts, from scratch or from trained weights.

A run can be killed at any moment and started again with the same call: it continues from its last checkpoint and, on
a CPU, ends with the very weights of an unbroken run. What counts as the same call is the plan: the architecture, the
data's fingerprints and every option that changes the result.
"""

from __future__ import annotations

import copy
import inspect
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmscope.errors import InputError
from ssmscope.tasks.text import TextData
from ssmscope.training.plan import (
    ARCHITECTURES,
    CLAIMED,
    FINISHED,
    GATE,
    checked,
    is_finished,
    parts_of,
    plan_of,
)

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ssmscope.tasks.batches import Examples
    from ssmscope.training.fitting import Outcome, Vocabulary

STEPS = (0.05, 0.5)
RATES = (0.02, 0.5)
"""The initial range of Δ and of |A|: memories of 1 / (Δ |A|) = 4 to 1,000 tokens.

With transformers' defaults (Δ from 0.001 to 0.1, |A| from 1) the state adds about one per cent to a layer's output at
first, and a model that is regularised for a small data set stays at chance for several epochs.
"""


def train_classifier(
    architecture: str,
    data: str | Path,
    out: str | Path,
    *,
    split: str | None = None,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    held_out: float = 0.1,
    init_from: str | Path | None = None,
    base: str | None = None,
    width: int | None = None,
    layers: int | None = None,
    state: int | None = None,
    head_width: int | None = None,
    expand: int | None = None,
    vocabulary: int | None = None,
    lowercase: bool | None = None,
    max_length: int = 128,
    beta: float | None = None,
    tau: float | None = None,
    prior: float | None = None,
    kl: str | None = None,
    epochs: int = 20,
    batch_size: int = 32,
    learning_rate: float = 4e-3,
    weight_decay: float = 0.1,
    warmup: float = 0.1,
    clip: float = 1.0,
    dropout: float = 0.3,
    embedding_dropout: float = 0.5,
    token_dropout: float = 0.2,
    subword_dropout: float = 0.2,
    label_smoothing: float = 0.1,
    patience: int = 8,
    seed: int = 0,
    precision: str = "fp32",
    saved_as: str = "bfloat16",
    device: str | None = None,
    checkpoint_minutes: float = 5.0,
    progress: bool = True,
    command: str | None = None,
) -> Path:
    """Train a classifier and write it to `out`: config.json, model.safetensors, the tokenizer, README.md (the model
    card) and training.json. The directory can be given to `ssmscope.load`.

    AdamW (no decay on biases, norms, A, D and Δ's bias), linear warm-up and cosine decay, gradient clipping, batches
    of alike length. The weights of the epoch with the best validation accuracy are kept (ties: the lower loss).

    Args:
        architecture: `mamba`, `mamba2`, `baleen-b` or `baleen-e`.
        data: a known data set (`sst2`, `imdb`, `rotten_tomatoes`, `snli`, `wnli`) or a file with `text` and `label`.
        out: the directory; new, empty, or of the same run, which is then continued.
        split: of a known data set, to train on; by default `train`.
        validation: a file or known data set to choose the epoch by; by default the data set's own validation split,
            and where it has none a share of the training examples, drawn by the seed.
        test: a file or known data set, read once at the end; by default the data set's own test split, if labelled.
        held_out: that share.
        init_from: a trained model (directory, demo or hub id) to start from, with its sizes and tokenizer. A Mamba or
            Mamba-2 becomes a Baleen without a new parameter.
        base: what a Baleen from scratch is built on, `mamba2` (default) or `mamba`.
        width: of the residual stream (128).
        layers: their number (1).
        state: N, components of the state per channel (16).
        head_width: P, channels of a Mamba-2 head (16).
        expand: inner channels per channel of the residual stream (2).
        vocabulary: tokens of the byte-pair tokenizer, trained on the training texts (4000).
        lowercase: whether it reads all text as lower case (True).
        max_length: longer texts are cut to so many tokens, the end token kept.
        beta: weight of Baleen's KL (the paper's: 0.01 for Baleen-B, 0.5 for Baleen-E).
        tau: temperature of Baleen-B's relaxed gates (0.5).
        prior: Baleen-B's prior keep probability (0.5), or Baleen-E's prior mean of Δ (its mean at the start).
        kl: Baleen-E's divergence, `true` or `printed` (Eq. 9 to the letter).
        epochs: passes over the data, at most.
        batch_size: texts a step.
        learning_rate: at its peak.
        weight_decay: AdamW's.
        warmup: share of all steps until the peak.
        clip: the gradient's largest norm.
        dropout: of the vector that the head reads.
        embedding_dropout: of the components of token embeddings.
        token_dropout: share of tokens that are replaced by the unknown token.
        subword_dropout: share of byte-pair merges that are skipped, anew in every epoch (BPE-dropout).
        label_smoothing: share of the target that is spread over all classes.
        patience: epochs without a better validation accuracy until training stops.
        seed: of everything that draws.
        precision: `fp32`, or `bf16` for automatic mixed precision.
        saved_as: type of the stored weights, `bfloat16`, `float16` or `float32`. Accuracies are measured on these.
        device: by default `cuda` where there is one, else `cpu`.
        checkpoint_minutes: a checkpoint is written after every epoch, and within one after so many minutes.
        progress: whether to show it on stderr.
        command: how the user called this, for the model card; by default the Python call.

    Returns:
        `out`. A finished run is left as it is.

    Raises:
        InputError: an option outside its range, data that cannot be used, another run in `out`, a model in
            `init_from` that cannot become `architecture`, or a loss that is no longer finite.
    """
    given: dict[str, Any] = dict(locals())
    options = checked(given)
    parts = parts_of(options)
    plan = plan_of(options, parts)
    out = Path(out)
    console = _console(progress)
    if is_finished(out, plan):
        console.print(f"{out} holds this very run, finished: nothing to do")
        return out

    import torch

    from ssmscope.training.checkpoint import random_states, restore_random_states, seed_everything

    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device '{device}' cannot be used here: {str(error).splitlines()[0]}") from error
    before = random_states()
    try:
        seed_everything(seed)
        _train(out, options, parts, plan, where, command or _python_call(given), console)
    finally:
        restore_random_states(before)
    return out


def _python_call(given: Mapping[str, Any]) -> str:
    """The call with every argument that is not at its default."""
    words = []
    for name, parameter in inspect.signature(train_classifier).parameters.items():
        value = str(given[name]) if isinstance(given[name], Path) else given[name]
        if parameter.default is inspect.Parameter.empty:
            words.append(repr(value))
        elif value != parameter.default:
            words.append(f"{name}={value!r}")
    return f"train_classifier({', '.join(words)})"


def _console(shown: bool) -> Console:
    """Prints on stderr, or nowhere."""
    from rich.console import Console

    return Console(stderr=True, quiet=not shown, highlight=False, markup=False, soft_wrap=True)


# ---- the model


def _build(options: Mapping[str, Any], train: TextData) -> tuple[Any, Any]:
    """The tokenizer and the classifier to train, fresh or with the weights of `init_from`."""
    from ssmscope.models.classifier import SSMClassifierConfig, SSMForSequenceClassification

    source = None
    if options["init_from"] is None:
        from ssmscope.tasks.tokenizer import train_tokenizer

        tokenizer = train_tokenizer(
            train.texts,
            vocabulary=options["vocabulary"],
            lowercase=options["lowercase"],
            max_length=options["max_length"],
        )
        backbone_config = _backbone_config(options, tokenizer)
        backbone = None
    else:
        from ssmscope.models.load import load

        source = load(str(options["init_from"]))
        tokenizer, backbone = source.tokenizer, _converted(source, options)
        backbone_config = backbone.config
    names = train.label_names
    config = SSMClassifierConfig(
        backbone=backbone_config,
        dropout=options["dropout"],
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )
    module = SSMForSequenceClassification(config)
    if backbone is None:
        _spread_decays(module)
    else:
        module.backbone.load_state_dict(backbone.state_dict())
    if source is not None and source.is_classifier and source.labels == list(names):
        module.head.load_state_dict(source.module.head.state_dict())
    return tokenizer, module


def _backbone_config(options: Mapping[str, Any], tokenizer: Any) -> Any:
    from transformers import Mamba2Config, MambaConfig

    from ssmscope.models.baleen import BaleenMamba2Config, BaleenMambaConfig

    gate = ARCHITECTURES[options["architecture"]]
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": options["width"],
        "num_hidden_layers": options["layers"],
        "state_size": options["state"],
        "expand": options["expand"],
        "time_step_min": STEPS[0],
        "time_step_max": STEPS[1],
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.cls_token_id,
        "use_cache": False,
    }
    if options["base"] == "mamba2":
        fields["head_dim"] = options["head_width"]
        fields["num_heads"] = options["width"] * options["expand"] // options["head_width"]
        fields["n_groups"], fields["chunk_size"] = 1, 32
        # no limit, in a number that JSON has: transformers 4 cannot read the infinity that transformers 5 writes
        fields["time_step_limit"] = (0.0, 1e9)
    if gate is None:
        return (Mamba2Config if options["base"] == "mamba2" else MambaConfig)(**fields)
    fields.update(gate=gate, **{name: options[name] for name in GATE if options[name] is not None})
    return (BaleenMamba2Config if options["base"] == "mamba2" else BaleenMambaConfig)(**fields)


def _spread_decays(module: Any) -> None:
    """|A| of every layer from the smallest to the largest of `RATES` in equal ratios, over states or heads."""
    import torch

    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):
            rates = torch.linspace(math.log(RATES[0]), math.log(RATES[1]), parameter.shape[-1])
            parameter.data.copy_(rates.expand_as(parameter))


def _converted(source: Any, options: Mapping[str, Any]) -> Any:
    """The backbone of a loaded model as the architecture that was asked for, no parameter added."""
    from ssmscope.models.baleen import convert

    architecture, gate = options["architecture"], ARCHITECTURES[options["architecture"]]
    backbone = getattr(source.module, "backbone", None)
    kind = getattr(getattr(backbone, "config", None), "model_type", None)
    if source.tokenizer is None:
        raise InputError(f"{source.name} has no tokenizer; init_from needs a model that reads text")
    chosen = {name: options[name] for name in GATE if options[name] is not None}
    if gate is not None and kind in ("mamba", "mamba2"):
        return convert(backbone, gate, **chosen)
    same_gate = gate is not None and getattr(getattr(backbone, "config", None), "gate", None) == gate
    if kind == architecture or (same_gate and not chosen):
        return backbone
    raise InputError(
        f"{source.name} is a {kind or type(source.module).__name__}, which cannot become {architecture}; a Mamba or "
        "Mamba-2 can become a Baleen, and every architecture can be trained further with its own gate as it is"
    )


# ---- the run


def _train(
    out: Path,
    options: Mapping[str, Any],
    parts: Mapping[str, TextData | None],
    plan: Mapping[str, Any],
    device: torch.device,
    command: str,
    console: Console,
) -> None:
    from ssmscope.models.quiet import quiet
    from ssmscope.tasks.batches import encode
    from ssmscope.tasks.subwords import SubwordDropout
    from ssmscope.training.checkpoint import write_json
    from ssmscope.training.fitting import Fit

    train, held = parts["train"], parts["validation"]
    assert train is not None and held is not None
    with quiet():
        tokenizer, module = _build(options, train)
    vocabulary = _vocabulary(tokenizer, options)
    if not (out / CLAIMED).exists():
        try:
            write_json(out / CLAIMED, plan)
        except OSError as error:
            raise InputError(f"{out} cannot be written to: {error.strerror}") from error
    examples = encode(train, tokenizer, options["max_length"])
    epoch_examples: Callable[[int], Examples] = lambda epoch: examples  # noqa: E731
    if options["subword_dropout"]:
        cuts = SubwordDropout(train, tokenizer, options["max_length"], options["subword_dropout"], options["seed"])
        epoch_examples = cuts.examples
    validation = encode(held, tokenizer, options["max_length"])
    checkpoint = out / CLAIMED.parent / "state.pt"
    fit = Fit(module.to(device), epoch_examples, validation, vocabulary, options, checkpoint, console)
    outcome = fit.run()
    module.load_state_dict(outcome.weights)
    _save(out, module, tokenizer, options["saved_as"])
    measured = _measure(out, parts, vocabulary, options, device)
    _describe(out, {**plan, **measured}, module, outcome, options, device, command)
    shutil.rmtree((out / CLAIMED).parent)
    for name in ("validation", "test"):
        if measured[name] is not None:
            console.print(f"{name} accuracy {measured[name]['accuracy']:.4f} of the stored weights")


def _vocabulary(tokenizer: Any, options: Mapping[str, Any]) -> Vocabulary:
    from ssmscope.training.fitting import Vocabulary

    if options["token_dropout"] and tokenizer.unk_token_id is None:
        raise InputError(
            f"token_dropout is {options['token_dropout']}, but the tokenizer has no unknown token; set it to 0"
        )
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return Vocabulary(pad_id, tokenizer.unk_token_id, tuple(sorted(special)))


def _save(out: Path, module: Any, tokenizer: Any, saved_as: str) -> None:
    import torch

    from ssmscope.models.quiet import quiet
    from ssmscope.tasks.tokenizer import save_tokenizer

    stored = copy.deepcopy(module).cpu().to(getattr(torch, saved_as))
    with quiet():
        stored.save_pretrained(str(out))
    save_tokenizer(tokenizer, out)


def _measure(
    out: Path,
    parts: Mapping[str, TextData | None],
    vocabulary: Vocabulary,
    options: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """Accuracies of the weights in `out`, read back, in float32."""
    from ssmscope.model import fast_scan
    from ssmscope.models.load import load
    from ssmscope.tasks.batches import encode
    from ssmscope.training.card import accuracy_record
    from ssmscope.training.fitting import evaluate

    model = load(out, dtype="float32", device=device)
    found: dict[str, Any] = {}
    for name in ("validation", "test"):
        data = parts[name]
        if data is None:
            found[name] = None
            continue
        with fast_scan(model.module):
            examples = encode(data, model.tokenizer, options["max_length"])
            right, loss = evaluate(model.module, examples, vocabulary, device)
        found[name] = accuracy_record(right, len(data), loss)
    return found


def _describe(
    out: Path,
    result: Mapping[str, Any],
    module: Any,
    outcome: Outcome,
    options: Mapping[str, Any],
    device: torch.device,
    command: str,
) -> None:
    """README.md, then training.json, whose presence says that the run is finished."""
    from ssmscope.training.card import model_card, versions
    from ssmscope.training.checkpoint import write_atomically, write_json

    config = module.config
    record = {
        **result,
        "backbone": config.backbone.model_type,
        "labels": [config.id2label[i] for i in range(config.num_labels)],
        "parameters": sum(p.numel() for p in module.parameters()),
        "saved_as": options["saved_as"],
        "precision": options["precision"],
        "seed": options["seed"],
        "device": device.type,
        "best_epoch": outcome.best_epoch,
        "epochs_run": len(outcome.history),
        "history": outcome.history,
        "command": command,
        "versions": versions(),
    }
    write_atomically(out / "README.md", lambda stream: stream.write(model_card(record).encode("utf-8")))
    write_json(out / FINISHED, record)
