"""Options of a training run, each declared once, and their defaults by the data and the architecture."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ssmscope.api.options import Metavar
from ssmscope.data.planted import TASKS as PLANTED
from ssmscope.errors import InputError, did_you_mean


class Allowed(NamedTuple):
    """Condition on an option's value, and the same in words."""

    fits: Callable[[Any], bool]
    words: str


COUNT = Allowed(lambda value: value >= 1, "at least 1")
NOT_NEGATIVE = Allowed(lambda value: value >= 0, "0 or more")
POSITIVE = Allowed(lambda value: value > 0, "above 0")
PROBABILITY = Allowed(lambda value: 0 <= value <= 1, "from 0 to 1")
PART = Allowed(lambda value: 0 <= value < 1, "at least 0 and below 1")
SHARE = Allowed(lambda value: 0 < value <= 1, "above 0 and at most 1")
INNER = Allowed(lambda value: 0 < value < 1, "above 0 and below 1")
TWO = Allowed(lambda value: value >= 2, "at least 2: a token and the end token")

CLASSIFIED, PROMPTED = ("text", "pixels", "sequences", "instructions"), ("text", "instructions")
EMBEDDED = ("text", "language", "tokens", "sequences", "instructions")
SPEAKING = ("language", "instructions", "tokens")

Whole = int | None
Number = float | None
Word = str | None
Name = str | Path | None
Flag = bool | None


def option(
    words: str,
    allowed: Allowed | tuple[str, ...] | None = None,
    most: int | None = None,
    *,
    kinds: tuple[str, ...] = (),
    default: Any = None,
) -> Any:
    """Declare an option by its help, the condition on its value or its words, an upper limit beyond which a run would
    exhaust the memory or never end, and the kinds of data that it applies to, where these are not all."""
    return field(default=default, metadata={"help": words, "allowed": allowed, "most": most, "kinds": kinds})


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of a training run. None stands for the default of the data and the architecture (`defaults`)."""

    recipe: Word = option("experiment1 or experiment2 of the selective SSM's paper (Honarpisheh et al., section 5).")
    split: Word = option("split of a known data set to train on (train).")
    validation: Name = option(
        "a file or known data set that chooses the epoch; else the data's own split, or held_out."
    )
    test: Name = option(
        "a file or known data set, read once at the end; by default the data's own labelled test split."
    )
    columns: Word = option("columns to read of the files, such as text=sentence,label=sentiment.")
    held_out: Number = option("share of the training examples to hold out for validation; 0 for none.", PART)
    share: Number = option("share of the training examples that are used, equally many per class.", SHARE)
    length: Whole = option(
        "tokens of generated sequences or of rows; words of questions' longest context.", COUNT, 2**20
    )
    examples: Whole = option("generated training examples; instruct: maximum per task (10,000).", COUNT, 2**27)
    pairs: Whole = option("mqar: pairs of a sequence (4), at most a quarter of its length.", COUNT, 2**18)
    flipped: Number = option("majority: probability that a one of the training set becomes a zero.", PROBABILITY)
    every_token: Flag = option(
        "recall tasks: train on every next token, as MAD's authors do; scores are those of the values (False)."
    )
    unit: Word = option("language: word or byte.", ("word", "byte"))
    filler: Name = option(
        "questions: generated (default), wikitext2 or a file with sentences to put between the facts."
    )
    mixture: Word = option("instruct: tasks separated by commas (sst2,wnli,snli).")
    init_from: Name = option(
        "a trained model to start from, with its sizes and tokenizer; a Mamba becomes a Baleen without new parameters."
    )
    base: Word = option("base of a Baleen, Diff-Mamba, GroupMamba or GFSSM (mamba2).", ("mamba2", "mamba"))
    width: Whole = option("width of the residual stream.", COUNT, 2**16)
    layers: Whole = option("number of layers.", COUNT, 1000)
    state: Whole = option("N, components of the state per channel; keys of a GLA or RetNet head.", COUNT, 2**12)
    head_width: Whole = option("P, channels of a Mamba-2 head.", COUNT, 2**16)
    heads: Whole = option("number of heads of GLA and RetNet.", COUNT, 2**12)
    expand: Whole = option("inner channels per channel of the residual stream.", COUNT, 64)
    decays: Word = option(
        "initialization of Δ and A, standard as in transformers, or spread: memories of 4 to 1,000 tokens.",
        ("standard", "spread"),
    )
    beta: Number = option("weight of Baleen's KL (paper: 0.01 for Baleen-B, 0.5 for Baleen-E).", NOT_NEGATIVE)
    tau: Number = option("temperature of Baleen-B's relaxed gates (0.5).", POSITIVE)
    prior: Number = option("Baleen-B's prior keep probability (0.5), Baleen-E's prior mean of Δ (at first).", POSITIVE)
    kl: Word = option("Baleen-E's divergence, true or printed (Eq. 9 as printed).", ("true", "printed"))
    samples: Word = option("Baleen-B's gates in training (hard); soft ones have another mean.", ("hard", "soft"))
    kl_over: Word = option("reduction of the KL over positions, mean or sum (mean; Baleen, Eq. 5).", ("mean", "sum"))
    prior_per: Word = option("Baleen-E: one prior mean of Δ per layer (default) or per head.", ("layer", "head"))
    prior_from: Number = option("Baleen-B's prior in the first epochs, from which it moves to prior.", INNER)
    prior_step: Number = option("step of the prior every prior_every epochs (0.1).", POSITIVE)
    prior_every: Whole = option("epochs between two steps of the prior (10).", COUNT)
    scope: Word = option("Diff-Mamba: block (Diff-Mamba, default) or s6 (Diff-S6).", ("block", "s6"))
    differential_layers: Word = option("Diff-Mamba: full, or hybrid, every second layer (full).", ("full", "hybrid"))
    normalize: Flag = option("Diff-Mamba: root-mean-square norm after the subtraction (True; Eqs. 16 and 21).")
    lambda_form: Word = option(
        "Diff-Mamba: λ from a vector's sum (sum; Eq. 17), one number (scalar) or exponentials (exponential; Eq. 11).",
        ("sum", "scalar", "exponential"),
    )
    tied: Flag = option("tie a language model's head to its embeddings (True for instruct).", kinds=SPEAKING)
    k: Whole = option("GroupMamba: number of modules whose states a module attends to (2).", COUNT, 1000)
    cross_attention: Flag = option("GroupMamba: weigh the states of a group by attention, else average them (True).")
    state_groups: Whole = option("Q of GFSSM, the number of states that take turns (2).", COUNT, 2**10)
    fir_taps: Whole = option("number of taps of GFSSM's filter (4).", COUNT, 2**10)
    prompt: Flag = option("GFSSM: learn the states before the first token, the attention sink (True).")
    spectral_abscissa: Number = option("s_A of the selective SSM at the start (0).")
    start: Word = option(
        "selective SSM: W_B, W_C and q from N(0, 1/d) with p = 0 (scaled, default), or these, p and the head from "
        "N(0, 1), as its authors draw them (normal).",
        ("scaled", "normal"),
    )
    padding: Word = option(
        "selective SSM on texts: held leaves the state as it is at padding (default); read pads every text to "
        "max_length and reads the padding as tokens, as its authors do.",
        ("held", "read"),
        kinds=("text",),
    )
    vocabulary: Whole = option(
        "number of tokens of the byte-pair tokenizer, trained on the training texts or prompts (4000; for books "
        "4,096), of words (10,000), or of a generated task.",
        most=2**22,
    )
    lowercase: Flag = option("lower-case all text for a byte-pair tokenizer (True).", kinds=PROMPTED)
    max_length: Whole = option(
        "maximum number of tokens of a text; longer ones are cut before their end token.", TWO, 2**20, kinds=("text",)
    )
    epochs: Whole = option("maximum number of passes over the data.", COUNT, 10**6)
    batch_size: Whole = option("examples per step.", COUNT, 2**20)
    learning_rate: Number = option("peak learning rate.", POSITIVE)
    schedule: Word = option("cosine or constant.", ("cosine", "constant"))
    optimizer: Word = option(
        "adamw, or adam, whose weight decay is a term of the loss and holds for all parameters (adamw).",
        ("adamw", "adam"),
    )
    weight_decay: Number = option("weight decay.", NOT_NEGATIVE)
    warmup: Number = option("share of all steps until the peak.", PART)
    clip: Number = option("maximum norm of the gradient.", POSITIVE)
    dropout: Number = option("dropout before the head of a classifier or for instructions.", PART, kinds=CLASSIFIED)
    embedding_dropout: Number = option("dropout of the components of token embeddings.", PART, kinds=EMBEDDED)
    token_dropout: Number = option("share of tokens replaced by the unknown token.", PART, kinds=PROMPTED)
    subword_dropout: Number = option("share of byte-pair merges skipped, anew in every epoch.", PART, kinds=PROMPTED)
    label_smoothing: Number = option("share of the target spread over all classes.", PART, kinds=CLASSIFIED)
    prompt_weight: Number = option("weight of the loss on a prompt's own tokens.", NOT_NEGATIVE, kinds=SPEAKING[1:])
    spread_penalty: Number = option(
        "weight of max(0, 0.1 − the standard deviation of a batch's answers); 10 for the selective SSM.",
        NOT_NEGATIVE,
        kinds=("text", "sequences"),
    )
    patience: Whole = option("epochs without a better validation score until training stops.", COUNT)
    seed: int = option("random seed.", NOT_NEGATIVE, default=0)
    precision: str = option(
        "fp32; tf32, whose matrix products on a GPU have 10 binary digits; or bf16, automatic mixed precision.",
        ("fp32", "tf32", "bf16"),
        default="fp32",
    )
    saved_as: Word = option(
        "type of the stored weights, bfloat16, float16 or float32. Accuracies are measured on these.",
        ("bfloat16", "float16", "float32"),
    )
    device: Word = option("by default cuda if available, else cpu.")
    compile: bool = option(
        "fuse norms, convolutions and GLA's scan with torch.compile, and on a GPU replay the step of many models "
        "on examples of one length from a CUDA graph; each after a check that gradients agree.",
        default=False,
    )
    checkpoint_minutes: float = option("minutes between checkpoints within an epoch.", NOT_NEGATIVE, default=5.0)
    progress: bool = option("show progress on stderr.", default=True)
    log: Word = option("tensorboard, wandb or both, by a comma: log there; TensorBoard's files are in the run's logs.")


OPTIONS: Mapping[str, Mapping[str, Any]] = {each.name: each.metadata for each in fields(TrainingOptions)}
"""Declaration of each option, by name."""

OF_RUN = """recipe split validation test columns length examples unit filler init_from epochs seed device compile
checkpoint_minutes progress log""".split()
SETTINGS = frozenset(OPTIONS) - {*OF_RUN}
"""Options of the model and its training, which are settings; the others say what is read and how it is run."""


def parameters() -> Iterator[inspect.Parameter]:
    """Yield the options as parameters, whose annotations `ssmscope.api.signatures` reads."""
    hints = typing.get_type_hints(TrainingOptions)
    for each in fields(TrainingOptions):
        kind = Word if str in typing.get_args(hints[each.name]) else hints[each.name]
        marks = (each.metadata["help"], *((Metavar("NAME"),) if kind in (str, Word) else ()))
        hint: Any = Annotated[(kind, *marks)]
        yield inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hint)


DATA_KINDS = ("text", "pixels", "sequences", "tokens", "language", "instructions")
"""Kinds of data, in the order of the columns of `BY_KIND`."""

BY_KIND: Mapping[str, tuple[Any, ...]] = {
    "width": (128, 32, 64, 64, 128, 64),
    "layers": (1, 3, 2, 2, 4, 2),
    "state": (16, 64, 16, 16, 16, 16),
    "heads": (4, 1, 2, 2, 4, 4),
    "decays": ("spread", "standard", "standard", "standard", "standard", "spread"),
    "tied": (None, None, None, None, None, True),
    "max_length": (128, None, None, None, None, None),
    "examples": (None, None, None, None, None, 10_000),
    "held_out": (0.1, 0.05, 0.0, 0.1, 0.1, 0.1),
    "epochs": (20, 100, 50, 12, 10, 24),
    "batch_size": (32, 256, 32, 64, 16, 64),
    "learning_rate": (4e-3, 1e-3, 3e-3, 2e-3, 2e-3, 3e-3),
    "warmup": (0.1, 0.01, 0.1, 0.1, 0.1, 0.1),
    "dropout": (0.3, 0.0, 0.0, 0.0, 0.0, 0.2),
    "embedding_dropout": (0.5, 0.0, 0.0, 0.0, 0.2, 0.4),
    "token_dropout": (0.2, 0.0, 0.0, 0.0, 0.0, 0.1),
    "subword_dropout": (0.2, 0.0, 0.0, 0.0, 0.0, 0.1),
    "label_smoothing": (0.1, 0.0, 0.0, 0.0, 0.0, 0.1),
    "prompt_weight": (None, None, None, None, None, 0.0),
    "patience": (8, None, None, None, None, None),
    "saved_as": ("bfloat16", "float32", "float32", "float32", "float32", "bfloat16"),
}
"""Defaults by the kind of data. Pixels: three layers of width 32 and 100 epochs; AdamW 1e-3 with decay 0.1 and a cosine
(Baleen, section B)."""

PLAIN: Mapping[str, Any] = {
    **{"head_width": 16, "expand": 2, "share": 1.0, "schedule": "cosine", "weight_decay": 0.1, "clip": 1.0},
    **{"optimizer": "adamw"},
    "spread_penalty": 0.0,
}
"""Defaults of every kind of data."""

NO_DROPOUT = dict.fromkeys(("dropout", "embedding_dropout", "token_dropout", "subword_dropout", "label_smoothing"), 0.0)

DATA: Mapping[str, Mapping[str, Any]] = {
    # These are about 13 million tokens, read ten times: a model of two million parameters does not memorize them.
    "books": {
        **{"width": 160, "layers": 7, "state": 64, "head_width": 32, "tied": True},
        **{"length": 512, "vocabulary": 4096, "epochs": 10, "batch_size": 64, "learning_rate": 3e-3},
        **{"embedding_dropout": 0.0, "warmup": 0.02, "saved_as": "bfloat16"},
    },
    # Every word counts, so none is dropped.
    **dict.fromkeys(
        PLANTED, {"layers": 2, "width": 48, "epochs": 12, "batch_size": 64, "patience": None, **NO_DROPOUT}
    ),
}
"""Differences from the defaults of the data's kind, by the name of the data."""

SELECTIVE: Mapping[str, Any] = {
    **{"learning_rate": 1e-2, "schedule": "constant", "weight_decay": 0.0, "warmup": 0.0, "clip": 5.0},
    **{**NO_DROPOUT, "spread_penalty": 10.0, "saved_as": "float32", "patience": None},
    **{"width": 16, "state": 4, "spectral_abscissa": 0.0, "start": "scaled", "padding": "held"},
}
"""Selective SSM: Adam at 1e-2 throughout, clipped at 5; d = 16 channels, N = 4 (Honarpisheh et al., B)."""

RECIPES: Mapping[str, Mapping[str, Any]] = {
    # Early training from an unstable start: 10 epochs on a balanced tenth of the data (section 5 and B).
    "experiment1": {"spectral_abscissa": 0.1, "share": 0.1, "epochs": 10},
    # Training to convergence from the stability boundary, on all data.
    "experiment2": {"spectral_abscissa": 0.0, "share": 1.0, "epochs": 100},
}
"""Experiments of the generalisation paper, for the selective SSM on `majority`, `listops` and `imdb`."""


def defaults(architecture: str, kind: str, recipe: str | None, data: str = "") -> dict[str, Any]:
    """Return the defaults of all options for an architecture, a kind of data, a named recipe and the data's name. Raise
    InputError if the recipe does not exist or belongs to another architecture."""
    found = {**PLAIN, **{name: row[DATA_KINDS.index(kind)] for name, row in BY_KIND.items()}, **DATA.get(data, {})}
    if architecture == "selective":
        found |= SELECTIVE
    if recipe is None:
        return found
    if recipe not in RECIPES:
        known = f"{', '.join(RECIPES)}{did_you_mean(recipe, RECIPES)}"
        raise InputError(f"unknown recipe '{recipe}'; choose one of {known}")
    if architecture != "selective":
        raise InputError(f"the recipe '{recipe}' is the selective SSM's; leave it out for {architecture}")
    return {**found, **RECIPES[recipe]}
