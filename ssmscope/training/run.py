"""Training of a state-space model on a task, from scratch or from trained weights.

A run can be killed at any moment and restarted with the same call: it continues from its last checkpoint and, on a
CPU, ends with exactly the weights of an uninterrupted run. Calls are the same if their plans are: the architecture, the
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
"""Weights of the decoder of the compression task, which is trained together with the model."""


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
    """Train a model and write it to the directory `out`, which `ssmscope.load` reads.

    The directory holds config.json, model.safetensors, the tokenizer if there is one, README.md (the model card) and
    training.json (all numbers). Training uses AdamW (no decay on biases, norms, A, D and Δ's bias), linear warm-up and
    cosine decay, and gradient clipping. The weights are those of the epoch with the best validation accuracy (ties: the
    lower loss; for language the lowest loss), or of the last epoch without validation examples. Options that are not
    given come from the recipe of the data's kind (`ssmscope.training.recipes`).

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
        split: split of a known data set to train on (`train`).
        validation: a file or known data set to choose the epoch by; by default the data set's own validation split, or
            else a random share of the training examples.
        test: a file or known data set, read once at the end; by default the data set's own test split, if labelled.
        held_out: that share; 0 for none.
        share: share of the training examples that are used, equally many per class.
        length: length of generated sequences or of a language model's rows in tokens; of the longest context of
            questions in words.
        examples: number of generated training examples; for `instruct` the maximum per task (10,000).
        pairs: mqar: keys and values of a sequence (4), at most a quarter of its length.
        flipped: majority: probability that a one of the training set becomes a zero.
        unit: language: `word` or `byte`.
        filler: questions: `generated` (default), `wikitext2` or a file with sentences to insert between the facts.
        mixture: `instruct`: tasks separated by commas (sst2,wnli,snli).
        init_from: a trained model (directory, demo or hub id) to start from, with its sizes and tokenizer. A Mamba or
            Mamba-2 becomes a Baleen without new parameters.
        base: base of a Baleen, Diff-Mamba, GroupMamba or GFSSM, `mamba2` (default) or `mamba`.
        width: width of the residual stream.
        layers: number of layers.
        state: N, components of the state per channel; key dimensions of a GLA or RetNet head.
        head_width: P, channels of a Mamba-2 head.
        heads: number of heads of GLA and RetNet.
        expand: inner channels per channel of the residual stream.
        decays: initialization of Δ and A, `standard` as in transformers, or `spread`: memories of 4 to 1,000 tokens.
        beta: weight of Baleen's KL (the paper's: 0.01 for Baleen-B, 0.5 for Baleen-E).
        tau: temperature of Baleen-B's relaxed gates (0.5).
        prior: Baleen-B's prior keep probability (0.5), or Baleen-E's prior mean of Δ (its mean at the start).
        kl: Baleen-E's divergence, `true` or `printed` (Eq. 9 as printed).
        samples: Baleen-B's gates in training, `hard` (default) or `soft`, which have another mean.
        kl_over: reduction of the divergences over positions, `mean` (default) or `sum` (Baleen, Eq. 5).
        prior_per: Baleen-E: one prior mean of Δ per `layer` (default) or per `head`.
        prior_from: Baleen-B's prior in the first epochs, from which it moves to `prior`.
        prior_step: step of the prior every `prior_every` epochs (0.1).
        prior_every: epochs between two steps of the prior (10).
        scope: Diff-Mamba: `block` (Diff-Mamba, default) or `s6` (Diff-S6).
        differential_layers: Diff-Mamba: `full` (default) or `hybrid`, every second layer.
        normalize: Diff-Mamba: apply a root-mean-square norm after the subtraction (True; Eqs. 16 and 21).
        lambda_form: Diff-Mamba: λ from the sum of a vector (`sum`, default; Eq. 17), from one number (`scalar`) or from
            exponentials (`exponential`, Eq. 11).
        tied: tie the head of a language model to its embeddings (True for `instruct`).
        k: GroupMamba: number of modules whose states a module attends to (2).
        state_groups: Q of GFSSM, the number of states that take turns (2).
        fir_taps: number of taps of GFSSM's filter (4).
        spectral_abscissa: s_A of the selective SSM at the start (0).
        vocabulary: number of tokens of the byte-pair tokenizer, trained on the training texts or prompts (4000; for
            `books` 4,096), of words (10,000), or of a generated task.
        lowercase: lower-case all text for a byte-pair tokenizer (True).
        max_length: maximum number of tokens of a text; longer ones are cut before their end token.
        epochs: maximum number of passes over the data.
        batch_size: examples per step.
        learning_rate: peak learning rate.
        schedule: `cosine` or `constant`.
        weight_decay: weight decay of AdamW.
        warmup: share of all steps until the peak.
        clip: maximum norm of the gradient.
        dropout: dropout before the head of a classifier or of a model of instructions.
        embedding_dropout: dropout of the components of token embeddings.
        token_dropout: share of tokens that are replaced by the unknown token.
        subword_dropout: share of byte-pair merges that are skipped, drawn again in every epoch (BPE-dropout).
        label_smoothing: share of the target that is spread over all classes.
        prompt_weight: instructions and questions: weight of the loss on the prompt's own tokens.
        spread_penalty: weight of max(0, 0.1 − the standard deviation of a batch's answers); 10 for the selective SSM.
        patience: epochs without a better validation score until training stops.
        seed: random seed.
        precision: `fp32`; `tf32`, whose matrix products on a GPU, including Mamba-2's scan, have 10 binary digits; or
            `bf16` for automatic mixed precision.
        saved_as: type of the stored weights, `bfloat16`, `float16` or `float32`. Accuracies are measured on these.
        device: by default `cuda` if available, else `cpu`.
        compile: fuse norms and convolutions with torch.compile, and on a GPU replay the step of a Mamba-2 or Baleen on
            examples of one length from a CUDA graph; each after a check that gradients agree.
        checkpoint_minutes: minutes between checkpoints within an epoch; every epoch ends with one.
        progress: show progress on stderr.
        command: the user's call for the model card; by default the Python call.

    Returns:
        `out`. A finished run is left unchanged.

    Raises:
        InputError: an option is outside its range, the data cannot be used, `out` holds another run, `init_from` cannot
            become `architecture`, the loss is no longer finite, or memory runs out.
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
        console.print(f"{out} holds this run, which is finished: nothing to do")
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
            if not is_finished(out, plan):  # Another process may have finished it meanwhile.
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
    """Return the call with every argument that is not at its default."""
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
    from ssmscope.architectures.loading.pretrained import quiet
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
    ready = working / "model"  # Its files are moved to `out` when all of them exist.
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

    from ssmscope.architectures.loading.pretrained import quiet
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
    except SafetensorError as error:  # The weights are in memory, so the disk has failed.
        raise OSError(str(error).splitlines()[0]) from error


def _measure(out: Path, objective: Objective, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Measure the weights in `out`, read back, in float32: accuracies, and selectivity on the first of the parts."""
    from safetensors.torch import load_file

    from ssmscope.architectures.loading.load import load
    from ssmscope.core.mixers import fast_scan
    from ssmscope.training.card import score_record
    from ssmscope.training.selectivity import Selectivity

    model = load(out.absolute(), dtype="float32", device=device)  # A relative "demo/…" would name a shipped model.
    if objective.extra is not None:
        objective.extra.load_state_dict({name: t.float() for name, t in load_file(out / EXTRA).items()})
    found: dict[str, Any] = {}
    # Sequences are about the gap of training and test accuracies, instructions about that of seen and unseen prompts.
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
    """Return the commands that made the model that a run starts from, if its directory records them."""
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
    """Write README.md, then training.json, which marks the run as finished."""
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
