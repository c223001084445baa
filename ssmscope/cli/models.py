"""The verb `models`, which lists them and the implementations of the recurrences."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer
from ssmscope.cli import command
from ssmscope.cli.command import FULL, JSON


def models(
    json: JSON = False,
    full: FULL = False,
    backends: Annotated[
        bool,
        typer.Option("--backends", help="List instead the implementations of the recurrences, and which are in use."),
    ] = False,
) -> None:
    """List the shipped models with their accuracy, and the model types that can be loaded."""
    if backends:
        _list_backends(json)
        return
    from ssmscope.core.known_models import demos, readable_types

    records = {name: json_module.loads((path / "training.json").read_bytes()) for name, path in demos().items()}
    if json:
        shown = ("architecture", "parameters", "data", "validation", "test")
        listed = [{"name": name, **{key: record[key] for key in shown}} for name, record in records.items()]
        print(json_module.dumps({"models": listed, "architectures": readable_types()}, indent=2))
        return

    if not full:
        own: dict[str, list[str]] = {}
        for name, record in records.items():
            told = "" if record["test"] is None else f" {record['test']['accuracy']:.3f}"
            own.setdefault(record["data"]["train"]["name"], []).append(name + told)
        command.show(
            ("trained on", "models"),
            [(data, ", ".join(named)) for data, named in own.items()],
            "\nNumbers are test accuracies. MODEL can also be a directory, a file or a hub id; --full lists the model "
            "types that can be read, intervals and sizes.",
        )
        return
    rows = []
    for name, record in records.items():
        tested = "–"
        if record["test"] is not None:
            tested = "{:.3f} ({:.3f}–{:.3f})".format(record["test"]["accuracy"], *record["test"]["interval"])
        learnt = record["data"]["train"]["name"]
        layers = (record.get("selectivity") or {"layers": []})["layers"]
        selecting = f"{100 * sum(layer['selective'] for layer in layers) / len(layers):.0f} %" if layers else "–"
        rows.append((name, record["architecture"], learnt, tested, selecting, f"{record['parameters']:,}"))
    command.show(
        ("model", "architecture", "trained on", "test accuracy", "selects", "size"),
        rows,
        "\nIn brackets: 95 % intervals over the test examples. Selects: the share of heads whose Δ varies over tokens "
        "by a tenth or more; with few, scores read off the gates are noise. Size is the number of parameters.\n"
        "\nMODEL can also be a directory or hub id in transformers' layout, a directory in mamba_ssm's, or the file of "
        f"a selective SSM's state dict.\nModel types that can be read: {', '.join(readable_types())}",
    )


def _list_backends(json: bool) -> None:
    from ssmscope.backends import explain

    found = explain()
    if json:
        print(json_module.dumps({"backends": [row._asdict() for row in found]}, indent=2))
        return
    used = ["yes" if row.reason is None else f"no, torch computes: {row.reason}" for row in found]
    rows = [(row.operation.replace("_", " "), row.device, row.implementation, how) for row, how in zip(found, used)]
    note = "\nTorch computes everything not listed. SSMSCOPE_BACKEND=torch switches all of these off."
    command.show(("operation", "device", "implementation", "in use"), rows, note)
