"""Training of a state-space model on a task, from scratch or from trained weights.

A run can be killed at any moment and restarted with the same call: it continues from its last checkpoint and, on a
CPU, ends with exactly the weights of an uninterrupted run. Calls are the same if their plans are: the architecture, the
data's fingerprints and every option that changes the result.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmscope.api.verbs import verb
from ssmscope.errors import InputError, ran_out_of_memory
from ssmscope.zoo.training.options import SETTINGS, TrainingOptions, parameters
from ssmscope.zoo.training.tracking import tracked, trackers_of

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from ssmscope.zoo.training.data import Parts


@verb("ssmscope.zoo.training.verbs:train", without=("command",), settings=SETTINGS)
def train_model(
    architecture: str, data: str | Path, out: str | Path, *, command: str | None = None, **options: Any
) -> Path:
    """Train a model and write it to the directory `out`, which `ssmscope.load` reads.

    The directory holds config.json, model.safetensors, the tokenizer if there is one, README.md (the model card) and
    training.json (all numbers). Training uses AdamW (no decay on biases, norms, A, D and Δ's bias), linear warm-up and
    cosine decay, and gradient clipping. The weights are those of the epoch with the best validation accuracy (ties: the
    lower loss; for language the lowest loss), or of the last epoch without validation examples. Options that are not
    given have the defaults of the data's kind (`ssmscope.zoo.training.options`).

    Args:
        architecture: a key of `ARCHITECTURES`.
        data: a name of `ssmscope.zoo.training.data.tasks`, as `analyze train --help` lists them, or a file: labelled
            texts (csv, tsv, jsonl or parquet with `text` and `label`), or a .txt file for a language model.
        out: the directory; new, empty, or of the same run, which is then continued.
        command: the user's call for the model card; by default the Python call.
        options: fields of `ssmscope.zoo.training.options.TrainingOptions`, which says what each is.

    Returns:
        `out`. A finished run is left unchanged.

    Raises:
        InputError: an option is outside its range, the data cannot be used, `out` holds another run, `init_from` cannot
            become `architecture`, the loss is no longer finite, or memory runs out.
    """
    chosen = TrainingOptions(**options)
    trackers_of(chosen.log)
    given = {"architecture": architecture, "data": data, "out": out, **vars(chosen), "command": command}

    from ssmscope.core.progress import on_stderr
    from ssmscope.data.columns import reading
    from ssmscope.zoo.training.data import parts_of
    from ssmscope.zoo.training.plan import CLAIMED, checked, is_finished, plan_of

    settled = checked(given)
    with reading(chosen.columns):
        parts, tokenizer = parts_of(settled)
    plan = plan_of(settled, parts)
    out = Path(out)
    console = on_stderr(chosen.progress)
    from ssmscope.api.checkpoint import clear, continued, random_states, restore_random_states, seed_everything

    if is_finished(out, plan):
        clear(out / CLAIMED)
        console.print(f"{out} holds this run, which is finished: nothing to do")
        return out

    import torch

    try:
        where = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device '{chosen.device}' cannot be used here: {str(error).splitlines()[0]}") from error
    before = random_states()
    try:
        with continued(out / CLAIMED):
            if not is_finished(out, plan):  # Another process may have finished it in the meantime.
                seed_everything(chosen.seed)
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
    from ssmscope.api.checkpoint import STATE, finish, write_json
    from ssmscope.loading.pretrained import quiet
    from ssmscope.zoo.training.answering import objective_of
    from ssmscope.zoo.training.build import build
    from ssmscope.zoo.training.card import describe, measure, save
    from ssmscope.zoo.training.fitting import Fit
    from ssmscope.zoo.training.plan import CLAIMED, FINISHED

    with quiet():
        tokenizer, module = build(options, parts["train"], tokenizer)
    module = module.to(device)
    objective = objective_of(parts, options, device, tokenizer, module)
    if not (out / CLAIMED).exists():
        write_json(out / CLAIMED, plan)
    working = (out / CLAIMED).parent
    with tracked(options["log"], out, module, options) as log:
        fit = Fit(module, objective, options, working / STATE, console, log)
        outcome = fit.run()
        module.load_state_dict(outcome.weights)
        ready = working / "model"  # Its files are moved to `out` when all of them exist.
        try:
            shutil.rmtree(ready, ignore_errors=True)
            save(ready, module, tokenizer, options["saved_as"], outcome.extra)
            measured = measure(ready, objective, options, device)
            describe(ready, {**plan, **measured}, module, outcome, options, device, command)
        except BaseException:
            shutil.rmtree(ready, ignore_errors=True)
            raise
        if (test := measured["test"]) is not None:
            log(fit.steps, {"test_accuracy": test["accuracy"], "test_loss": test["cross_entropy"]})
    for file in sorted(ready.iterdir(), key=lambda file: file.name == FINISHED.name):
        os.replace(file, out / file.name)
    finish(working)
    for name in ("validation", "test"):
        if measured[name] is not None:
            console.print(f"{name} accuracy {measured[name]['accuracy']:.4f} of the stored weights")
