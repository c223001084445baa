"""Fit a state-space model to a task, from scratch or from trained weights.

A run can be killed at any moment and started again with the same call: it continues from its last checkpoint and, on
a CPU, ends with the very weights of an unbroken run. What counts as the same call is the plan: the architecture, the
data's fingerprints and every option that changes the result.
"""

from __future__ import annotations

import copy
import inspect
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmscope.errors import InputError, ran_out_of_memory

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ssmscope.training.data import Parts
    from ssmscope.training.fitting import Outcome
    from ssmscope.training.objectives import Objective

EXTRA = "decoder.safetensors"
"""The weights of what was trained beside the model: the decoder of the compression task."""


def train_model(
    architecture: str,
    data: str | Path,
    out: str | Path,
    *,
    recipe: str | None = None,
    split: str | None = None,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    held_out: float | None = None,
    share: float | None = None,
    length: int | None = None,
    examples: int | None = None,
    pairs: int | None = None,
    flipped: float | None = None,
    unit: str | None = None,
    filler: str | Path | None = None,
    mixture: str | None = None,
    init_from: str | Path | None = None,
    base: str | None = None,
    width: int | None = None,
    layers: int | None = None,
    state: int | None = None,
    head_width: int | None = None,
    heads: int | None = None,
    expand: int | None = None,
    decays: str | None = None,
    beta: float | None = None,
    tau: float | None = None,
    prior: float | None = None,
    kl: str | None = None,
    samples: str | None = None,
    kl_over: str | None = None,
    prior_per: str | None = None,
    prior_from: float | None = None,
    prior_step: float | None = None,
    prior_every: int | None = None,
    scope: str | None = None,
    differential_layers: str | None = None,
    normalize: bool | None = None,
    lambda_form: str | None = None,
    tied: bool | None = None,
    k: int | None = None,
    state_groups: int | None = None,
    fir_taps: int | None = None,
    spectral_abscissa: float | None = None,
    vocabulary: int | None = None,
    lowercase: bool | None = None,
    max_length: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    schedule: str | None = None,
    weight_decay: float | None = None,
    warmup: float | None = None,
    clip: float | None = None,
    dropout: float | None = None,
    embedding_dropout: float | None = None,
    token_dropout: float | None = None,
    subword_dropout: float | None = None,
    label_smoothing: float | None = None,
    prompt_weight: float | None = None,
    spread_penalty: float | None = None,
    patience: int | None = None,
    seed: int = 0,
    precision: str = "fp32",
    saved_as: str | None = None,
    device: str | None = None,
    compile: bool = False,
    checkpoint_minutes: float = 5.0,
    progress: bool = True,
    command: str | None = None,
) -> Path:
    """Train a model and write it to `out`: config.json, model.safetensors, the tokenizer if there is one, README.md
    (the model card) and training.json (all numbers). The directory can be given to `ssmscope.load`.

    AdamW (no decay on biases, norms, A, D and Δ's bias), linear warm-up and cosine decay, gradient clipping. The
    weights of the epoch with the best validation accuracy are kept (ties: the lower loss; for language the lowest
    loss), without validation examples those of the last. What is not given is taken from the recipe of the data's kind
    (`ssmscope.training.recipes`).

    Args:
        architecture: `mamba`, `mamba2`, `baleen-b`, `baleen-e`, `diff-mamba`, `groupmamba`, `gfssm`, `gla`, `retnet`,
            `rwkv` or `selective`.
        data: labelled texts (`sst2`, `imdb`, `rotten_tomatoes`, `snli`, `wnli`, `planted-words`, `planted-recall`,
            `planted-xor`, `planted-position`, see `ssmscope.data.planted`, or a file with `text` and `label`),
            pixels (`cifar10`, `digits`), labelled sequences (`majority`, `listops`), generated tasks of tokens
            (`associative-recall`, `mqar`, `fuzzy-recall`, `noisy-recall`, `selective-copying`, `compression`,
            `memorization`), questions (`qa1` to `qa5`; `babi`, all five in contexts of several lengths; `needle`,
            `multi-key`, `multi-value`, `variables`, `common-words`), language (`wikitext2`, `books`
            or a .txt file), or `instruct`: SST-2, WNLI and SNLI as prompts that a language model answers with a label
            word.
        out: the directory; new, empty, or of the same run, which is then continued.
        recipe: `experiment1` or `experiment2` of the selective SSM's paper (Generalization bounds, section 5).
        split: of a known data set, to train on; by default `train`.
        validation: a file or known data set to choose the epoch by; by default the data set's own validation split,
            and where it has none a share of the training examples, drawn by the seed.
        test: a file or known data set, read once at the end; by default the data set's own test split, if labelled.
        held_out: that share; 0 for none.
        share: of the training examples that are used, as many of every class.
        length: of generated sequences, in tokens; of questions the longest context's, in words; of a language model's
            rows.
        examples: the number of generated training examples; of `instruct`, the most of each task (10,000).
        pairs: of mqar, the keys and values of a sequence (4), at most a quarter of its length.
        flipped: of majority, the probability with which a one of the training set becomes a zero.
        unit: of language, `word` or `byte`.
        filler: of questions, `generated` (default), or `wikitext2` or a file whose sentences lie between the facts.
        mixture: of `instruct`, its tasks with commas between them (sst2,wnli,snli).
        init_from: a trained model (directory, demo or hub id) to start from, with its sizes and tokenizer. A Mamba or
            Mamba-2 becomes a Baleen without a new parameter.
        base: what a Baleen, Diff-Mamba, GroupMamba or GFSSM is built on, `mamba2` (default) or `mamba`.
        width: of the residual stream.
        layers: their number.
        state: N, components of the state per channel; key dimensions of a GLA or RetNet head.
        head_width: P, channels of a Mamba-2 head.
        heads: of GLA and RetNet.
        expand: inner channels per channel of the residual stream.
        decays: how Δ and A begin, `standard` as in transformers, or `spread`: memories of 4 to 1,000 tokens.
        beta: weight of Baleen's KL (the paper's: 0.01 for Baleen-B, 0.5 for Baleen-E).
        tau: temperature of Baleen-B's relaxed gates (0.5).
        prior: Baleen-B's prior keep probability (0.5), or Baleen-E's prior mean of Δ (its mean at the start).
        kl: Baleen-E's divergence, `true` or `printed` (Eq. 9 to the letter).
        samples: of Baleen-B's gates in training, `hard` (default) or `soft`, which have another mean.
        kl_over: positions, whose divergences have their `mean` taken (default) or their `sum` (Baleen, Eq. 5).
        prior_per: of Baleen-E, one prior mean of Δ for every `layer` (default) or every `head`.
        prior_from: Baleen-B's prior in the first epochs, from which it goes to `prior`.
        prior_step: by how much, every `prior_every` epochs (0.1).
        prior_every: epochs between two steps of the prior (10).
        scope: of Diff-Mamba, `block` (Diff-Mamba, default) or `s6` (Diff-S6).
        differential_layers: `full` (default) or `hybrid`, every second layer.
        normalize: of Diff-Mamba, whether a root-mean-square norm follows the subtraction (True; Eqs. 16 and 21).
        lambda_form: of Diff-Mamba, λ of the sum of a vector (`sum`, default; Eq. 17), of one number (`scalar`) or by
            exponentials (`exponential`, Eq. 11).
        tied: of a language model, whether its head is its embeddings (True for `instruct`).
        k: of GroupMamba, the modules whose states a module attends to (2).
        state_groups: Q of GFSSM, the states that take turns (2).
        fir_taps: of GFSSM's filter (4).
        spectral_abscissa: s_A of the selective SSM at the start (0).
        vocabulary: tokens of the byte-pair tokenizer, trained on the training texts or prompts (4000; of `books`
            4,096); of words (10,000); of a generated task.
        lowercase: whether a byte-pair tokenizer reads all text as lower case (True).
        max_length: longer texts are cut to so many tokens, the end token kept.
        epochs: passes over the data, at most.
        batch_size: examples a step.
        learning_rate: at its peak.
        schedule: `cosine` or `constant`.
        weight_decay: AdamW's.
        warmup: share of all steps until the peak.
        clip: the gradient's largest norm.
        dropout: of the vector that a classifier's head reads, or the head of a model of instructions.
        embedding_dropout: of the components of token embeddings.
        token_dropout: share of tokens that are replaced by the unknown token.
        subword_dropout: share of byte-pair merges that are skipped, anew in every epoch (BPE-dropout).
        label_smoothing: share of the target that is spread over all classes.
        prompt_weight: of instructions and questions, the weight of the loss on the prompt's own tokens beside the
            answer's.
        spread_penalty: weight of max(0, 0.1 − the standard deviation of a batch's answers); 10 for the selective SSM.
        patience: epochs without a better validation score until training stops.
        seed: of everything that draws.
        precision: `fp32`; `tf32`, whose matrix products on a GPU, Mamba-2's scan included, have 10 binary digits; or
            `bf16` for automatic mixed precision.
        saved_as: type of the stored weights, `bfloat16`, `float16` or `float32`. Accuracies are measured on these.
        device: by default `cuda` where there is one, else `cpu`.
        compile: fuse norms and convolutions with torch.compile, and on a GPU play the step of a Mamba-2 or Baleen on
            examples of one length back from a CUDA graph; each after a check that gradients stay the same.
        checkpoint_minutes: a checkpoint is written after every epoch, and within one after so many minutes.
        progress: whether to show it on stderr.
        command: how the user called this, for the model card; by default the Python call.

    Returns:
        `out`. A finished run is left as it is.

    Raises:
        InputError: an option outside its range, data that cannot be used, another run in `out`, a model in
            `init_from` that cannot become `architecture`, a loss that is no longer finite, or more memory than there
            is.
    """
    given: dict[str, Any] = dict(locals())

    from ssmscope.core.progress import on_stderr
    from ssmscope.training.data import parts_of
    from ssmscope.training.plan import checked, is_finished, plan_of

    options = checked(given)
    parts, tokenizer = parts_of(options)
    plan = plan_of(options, parts)
    out = Path(out)
    console = on_stderr(progress)
    from ssmscope.training.checkpoint import clear, continued, random_states, restore_random_states, seed_everything
    from ssmscope.training.plan import CLAIMED

    if is_finished(out, plan):
        clear(out / CLAIMED)
        console.print(f"{out} holds this very run, finished: nothing to do")
        return out

    import torch

    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device '{device}' cannot be used here: {str(error).splitlines()[0]}") from error
    before = random_states()
    try:
        with continued(out / CLAIMED):
            if not is_finished(out, plan):  # another process may have ended it just now
                seed_everything(seed)
                try:
                    _train(out, options, parts, tokenizer, plan, where, command or _python_call(given), console)
                except (MemoryError, RuntimeError) as error:
                    if not ran_out_of_memory(error):
                        raise
                    raise InputError(
                        "this training needs more memory than there is; give a smaller model, width=… and layers=…, "
                        "or batch_size=…"
                    ) from error
    finally:
        restore_random_states(before)
    return out


def _python_call(given: Mapping[str, Any]) -> str:
    """The call with every argument that is not at its default."""
    words = []
    for name, parameter in inspect.signature(train_model).parameters.items():
        value = str(given[name]) if isinstance(given[name], Path) else given[name]
        if parameter.default is inspect.Parameter.empty:
            words.append(repr(value))
        elif value != parameter.default:
            words.append(f"{name}={value!r}")
    return f"train_model({', '.join(words)})"


def _train(
    out: Path,
    options: Mapping[str, Any],
    parts: Parts,
    tokenizer: Any,
    plan: Mapping[str, Any],
    device: torch.device,
    command: str,
    console: Console,
) -> None:
    from ssmscope.architectures.loading.quiet import quiet
    from ssmscope.training.build import build
    from ssmscope.training.checkpoint import STATE, finish, write_json
    from ssmscope.training.choice import objective_of
    from ssmscope.training.fitting import Fit
    from ssmscope.training.plan import CLAIMED, FINISHED

    with quiet():
        tokenizer, module = build(options, parts["train"], tokenizer)
    module = module.to(device)
    objective = objective_of(parts, options, device, tokenizer, module)
    if not (out / CLAIMED).exists():
        write_json(out / CLAIMED, plan)
    working = (out / CLAIMED).parent
    outcome = Fit(module, objective, options, working / STATE, console).run()
    module.load_state_dict(outcome.weights)
    ready = working / "model"  # whose files go to their places when all are there
    try:
        shutil.rmtree(ready, ignore_errors=True)
        _save(ready, module, tokenizer, options["saved_as"], outcome.extra)
        measured = _measure(ready, objective, options, device)
        _describe(ready, {**plan, **measured}, module, outcome, options, device, command)
    except BaseException:
        shutil.rmtree(ready, ignore_errors=True)
        raise
    for file in sorted(ready.iterdir(), key=lambda file: file.name == FINISHED.name):
        os.replace(file, out / file.name)
    finish(working)
    for name in ("validation", "test"):
        if measured[name] is not None:
            console.print(f"{name} accuracy {measured[name]['accuracy']:.4f} of the stored weights")


def _save(out: Path, module: Any, tokenizer: Any, saved_as: str, extra: Mapping[str, torch.Tensor]) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import Mamba2ForCausalLM

    from ssmscope.architectures.loading.quiet import quiet
    from ssmscope.architectures.own.generation import MAMBA2_TIED
    from ssmscope.data.tokenizer import save_tokenizer

    stored = copy.deepcopy(module).cpu().to(getattr(torch, saved_as))
    if type(stored) is Mamba2ForCausalLM:
        stored._tied_weights_keys = MAMBA2_TIED
    try:
        with quiet():
            stored.save_pretrained(str(out))
        if tokenizer is not None:
            save_tokenizer(tokenizer, out)
        if extra:
            half = {name: tensor.to(getattr(torch, saved_as)).contiguous() for name, tensor in extra.items()}
            save_file(half, out / EXTRA)
    except SafetensorError as error:  # of weights in memory: the disk is at fault
        raise OSError(str(error).splitlines()[0]) from error


def _measure(out: Path, objective: Objective, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Accuracies of the weights in `out`, read back, in float32, and whether the model selects: `selectivity` of the
    first part that is there of validation, test and training."""
    from safetensors.torch import load_file

    from ssmscope.architectures.loading.load import load
    from ssmscope.core.mixers import fast_scan
    from ssmscope.training.card import score_record
    from ssmscope.training.selectivity import Selectivity

    model = load(out.absolute(), dtype="float32", device=device)  # "demo/…" would name a shipped model
    if objective.extra is not None:
        objective.extra.load_state_dict({name: t.float() for name, t in load_file(out / EXTRA).items()})
    found: dict[str, Any] = {}
    # how far apart training and test accuracies are is what is asked of labelled sequences, and of instructions how far
    # apart seen and unseen prompts are
    more = {"sequences": ("train", "validation", "test"), "instructions": ("validation", "test", "unseen")}
    for name in more.get(options["kind"], ("validation", "test")):
        part = objective.parts[name]
        if part is None:
            found[name] = None
            continue
        watched = None if "selectivity" in found else Selectivity(model.module)
        with fast_scan(model.module, visit=None if watched is None else watched.visit):
            score = objective.score(model.module, name)
        found[name] = score_record(score, getattr(part, "characters", None), seed=options["seed"])
        if watched is not None:
            found["selectivity"] = {"part": name, "layers": watched.records()}
    return found


def _commands_before(source: str | Path | None) -> list[str]:
    """The commands that made the model that a run starts from, where its directory has our record of them."""
    from ssmscope.core.shipped import demos
    from ssmscope.training.checkpoint import read_json
    from ssmscope.training.plan import FINISHED

    file = demos().get(str(source), Path(str(source))) / FINISHED
    if source is None or not file.is_file():
        return []
    record = read_json(file)
    return [*record.get("commands_before", ()), *([record["command"]] if "command" in record else ())]


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
    from ssmscope.api.writing import write_whole
    from ssmscope.training.card import model_card, versions
    from ssmscope.training.checkpoint import write_json
    from ssmscope.training.plan import FINISHED

    config = module.config
    classifies = options["kind"] in ("text", "sequences", "pixels")
    record = {
        **result,
        "kind": options["kind"],
        "backbone": (getattr(config, "backbone", None) or config).model_type,
        "labels": [config.id2label[i] for i in range(config.num_labels)] if classifies else None,
        "parameters": sum(p.numel() for p in module.parameters()),
        "decoder": sum(tensor.numel() for tensor in outcome.extra.values()) or None,
        "saved_as": options["saved_as"],
        "precision": options["precision"],
        "seed": options["seed"],
        "device": device.type,
        "best_epoch": outcome.best_epoch,
        "epochs_run": len(outcome.history),
        "history": outcome.history,
        "command": command,
        "commands_before": _commands_before(options["init_from"]),
        "versions": versions(),
    }
    write_whole(out / "README.md", model_card(record))
    write_json(out / FINISHED, record)
