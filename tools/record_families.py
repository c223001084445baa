"""Record what works with every family of models, for the page of families in the documentation.

    python tools/record_families.py docs/families.json

Runs the first small model of each readable type (`tests/small_models.py`), with the installed transformers, whose
release is one of the keys of the file; those of other releases are kept. For each type it records the module that reads
its layers, the largest difference of the logits through the read layers from the model's own, in float64 and in units
of the largest logit, and for each question "yes", or the line with which it is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from examples import EXAMPLES, random_example  # noqa: E402
from loud import TrueFloat64, doubled, loud  # noqa: E402
import ssmscope  # noqa: E402
from ssmscope.core.mixers import adapter_for  # noqa: E402
from ssmscope.core.model import Model  # noqa: E402
from ssmscope.errors import InputError  # noqa: E402

IDS = [5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5]
QUESTIONS: dict[str, Callable[[Model, Any], Any]] = {
    "heatmap": ssmscope.heatmap,
    "attention": ssmscope.attention,
    "lrp": lambda model, batch: ssmscope.explain(model, batch, methods=["lrp"]),
    "stability": ssmscope.stability,
    "continues": lambda model, batch: model.run(batch, model.run(batch).states),
}


def batch_of(model: Model) -> Any:
    if model.channels is None:
        return model.encode(ids=IDS)
    size = model.config.image_size
    return model.encode(values=torch.linspace(0, 1, size[0] * size[1] * model.channels).view(-1, model.channels))


def answer(ask: Callable[[Model, Any], Any], model: Model) -> str:
    try:
        ask(model, batch_of(model))
    except InputError as error:
        return str(error)
    return "yes"


def measured(name: str) -> dict[str, Any]:
    model = Model(loud(random_example(name)), name="the model")
    exact = Model(doubled(loud(random_example(name))))
    with TrueFloat64(), torch.no_grad():
        batch = batch_of(exact)
        found = exact.trace(batch).logits[0].double()
        if batch.values is not None:
            own = exact.module(input_values=batch.values).logits[0]
        else:
            own = exact.module(input_ids=batch.input_ids).logits[0]
        own = own if own.ndim == 1 else own[-1]
    return {
        "adapter": adapter_for(model.mixers[0]).__name__.removeprefix("ssmscope."),  # type: ignore[attr-defined]
        "layers": type(model.mixers[0]).__name__,
        "difference": float((found - own).abs().max() / own.abs().max()),
        **{question: answer(ask, model) for question, ask in QUESTIONS.items()},
    }


def main(file: Path) -> None:
    """Measure every type once and write the file."""
    of_type: dict[str, str] = {}
    for name, made in EXAMPLES.items():
        of_type.setdefault(Model(made.models[name]).architecture, name)
    known = json.loads(file.read_text()) if file.exists() else {}
    release = transformers.__version__
    known = {each: rows for each, rows in known.items() if each.partition(".")[0] != release.partition(".")[0]}
    known[release] = {kind: measured(name) for kind, name in sorted(of_type.items())}
    file.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    main(parser.parse_args().file)
