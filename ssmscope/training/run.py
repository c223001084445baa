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
from ssmscope.training.recipes import Recipe, parameters

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ssmscope.training.data import Parts
    from ssmscope.training.fitting import Outcome
    from ssmscope.training.objectives import Objective

EXTRA = "decoder.safetensors"
"""Weights of the decoder of the compression task, which is trained together with the model."""


def train_model(
    architecture: str, data: str | Path, out: str | Path, *, command: str | None = None, **options: Any
) -> Path:
    """Train a model and write it to the directory `out`, which `ssmscope.load` reads.

    The directory holds config.json, model.safetensors, the tokenizer if there is one, README.md (the model card) and
    training.json (all numbers). Training uses AdamW (no decay on biases, norms, A, D and Δ's bias), linear warm-up and
    cosine decay, and gradient clipping. The weights are those of the epoch with the best validation accuracy (ties: the
    lower loss; for language the lowest loss), or of the last epoch without validation examples. Options that are not
    given come from the recipe of the data's kind (`ssmscope.training.recipes`).

    Args:
        architecture: a key of `ARCHITECTURES`.
        data: labelled texts (`sst2`, `imdb`, `rotten_tomatoes`, `snli`, `wnli`, `planted-words`, `planted-recall`,
            `planted-xor`, `planted-position`, see `ssmscope.data.planted`, or a file with `text` and `label`),
            pixels (`cifar10`, `digits`), labelled sequences (`majority`, `listops`), generated tasks of tokens
            (`associative-recall`, `mqar`, `fuzzy-recall`, `noisy-recall`, `selective-copying`, `compression`,
            `memorization`), questions (`qa1` to `qa5`; `babi`, all five in contexts of several lengths; `needle`,
            `multi-key`, `multi-value`, `variables`, `common-words`), language (`wikitext2`, `books`
            or a .txt file), or `instruct`: SST-2, WNLI and SNLI as prompts that a language model answers with a label
            word.
        out: the directory; new, empty, or of the same run, which is then continued.
        command: the user's call for the model card; by default the Python call.
        options: fields of `ssmscope.training.recipes.Recipe`, which says what each is.

    Returns:
        `out`. A finished run is left unchanged.

    Raises:
        InputError: an option is outside its range, the data cannot be used, `out` holds another run, `init_from` cannot
            become `architecture`, the loss is no longer finite, or memory runs out.
    """
    recipe = Recipe(**options)
    given = {"architecture": architecture, "data": data, "out": out, **vars(recipe), "command": command}

    from ssmscope.core.progress import on_stderr
    from ssmscope.training.data import parts_of
    from ssmscope.training.plan import checked, is_finished, plan_of

    settled = checked(given)
    parts, tokenizer = parts_of(settled)
    plan = plan_of(settled, parts)
    out = Path(out)
    console = on_stderr(recipe.progress)
    from ssmscope.training.checkpoint import clear, continued, random_states, restore_random_states, seed_everything
    from ssmscope.training.plan import CLAIMED

    if is_finished(out, plan):
        clear(out / CLAIMED)
        console.print(f"{out} holds this run, which is finished: nothing to do")
        return out

    import torch

    try:
        where = torch.device(recipe.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device '{recipe.device}' cannot be used here: {str(error).splitlines()[0]}") from error
    before = random_states()
    try:
        with continued(out / CLAIMED):
            if not is_finished(out, plan):  # Another process may have finished it meanwhile.
                seed_everything(recipe.seed)
                try:
                    _train(out, settled, parts, tokenizer, plan, where, command or _python_call(given), console)
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


# Signatures are read by the command line, notebooks and `_python_call`.
*_positional, _command, _ = inspect.signature(train_model).parameters.values()
train_model.__signature__ = inspect.Signature([*_positional, *parameters(), _command])  # type: ignore[attr-defined]


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
    from ssmscope.architectures.loading.quiet import quiet
    from ssmscope.training.answering import objective_of
    from ssmscope.training.build import build
    from ssmscope.training.checkpoint import STATE, finish, write_json
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
