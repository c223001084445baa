"""Baleen against Mamba-2 on texts: which β lets its gates select, and is what they say then more faithful?

    python benchmarks/baleen_texts.py train sst2 rotten_tomatoes snli imdb --out runs/texts --gpus 1 --cores 14
    python benchmarks/baleen_texts.py choose
    python benchmarks/baleen_texts.py table
    python benchmarks/baleen_texts.py position --out runs/texts --cores 2

Every model is one `analyze train` command, two layers of width 48, the same for all arms of a data set but for the
architecture, β and the form of the KL, from scratch or, in the warm arms, from Mamba-2's weights of the same seed.
Every measurement is one `analyze fidelity` command on test texts, after all models of the call are trained. What is
finished is a line of benchmarks/results/baleen-texts.jsonl and is not run again.

`choose` applies the criterion for β, on validation texts: a mean accuracy over the seeds within one point of the best
arm of the data set, and in every seed gates that select. A layer selects if the coefficient of variation of Δ over
tokens is 0.1 or more in at least half of its heads; of layer 0 the median over heads must reach 0.3 besides. Among the
arms that meet it and have β > 0, the most accurate is chosen.

`position` measures, of the chosen Baleen-E and of Mamba-2 trained as long, the accuracy with a region of each text
replaced by noise: one `analyze position` command a model, whose numbers are a line of baleen-texts-position.jsonl.

`table` gives ΔA (least minus most relevant first; larger is more faithful) × 100, means over seeds and 95 % t
intervals, and of each Baleen the difference from Mamba-2, seed by seed; then the documentation's verdicts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import running
from verdicts import Question, verdicts
from verdicts import table as told

RESULTS = Path(__file__).parent / "results" / "baleen-texts.jsonl"
POSITIONS = RESULTS.with_name("baleen-texts-position.jsonl")
SEEDS = (0, 1, 2)
"""Seeds with which the grid was run, β was chosen and the tables of three seeds are made."""
NEW_SEEDS = (3, 4, 5, 6, 7)
"""Seeds of SST-2 and Rotten Tomatoes alone, run after the choice, on which verdicts rest."""
SIZES = "--set layers=2 --set width=48 --set vocabulary=5000 --set subword_dropout=0.1"
RECIPES = {
    "sst2": "--data sst2 --epochs 16",
    "rotten_tomatoes": "--data rotten_tomatoes --epochs 16",
    "snli": "--data snli --split validation --epochs 16",
    "imdb": "--data imdb --set share=0.4 --set max_length=400 --epochs 6 --set batch_size=64",
    **{f"planted-{task}": f"--data planted-{task}" for task in ("words", "recall", "xor", "position")},
}
TEXTS = tuple(data for data in RECIPES if not data.startswith("planted"))
LIMITS = {"imdb": 100}
"""Texts on which fidelity is measured, 300 elsewhere."""
POSITION_TEXTS = {"imdb": 200}
"""Texts in which regions are replaced, 500 elsewhere."""
BETAS = {"true": ("0.001", "0.005", "0.02", "0.1"), "printed": ("0.001", "0.005", "0.02", "0.1")}
"""Grid of β of Baleen-E by the form of its KL."""
WARM = ("0.001", "0.005", "0.02")
BERNOULLI = ("0.01", "0.1", "1")
"""β of Baleen-B."""
ARMS = {
    "mamba2": "mamba2",
    "baleen-e β=0": "baleen-e --set beta=0",
    **{
        f"baleen-e {form} β={beta}": f"baleen-e --set beta={beta} --set kl={form}"
        for form in BETAS
        for beta in BETAS[form]
    },
    "mamba2 warm": "mamba2 --init-from",
    **{f"baleen-e true β={beta} warm": f"baleen-e --set beta={beta} --set kl=true --init-from" for beta in WARM},
    **{f"baleen-b β={beta}": f"baleen-b --set beta={beta}" for beta in ("0", *BERNOULLI)},
    "baleen-b β=0.01 warm": "baleen-b --set beta=0.01 --init-from",
}
METHODS = ("survival", "self-retention", "self-write", "ig", "gradxinput", "gradcam", "lrp")
SHOWN = ("lrp", "ig", "gradxinput", "gradcam", "survival", "self-write")
TABLED = tuple(method for method in SHOWN if method != "gradxinput")
"""Methods of the documentation's tables."""
Measure = Callable[[dict[str, Any]], float]

TOLERANCE = 0.01
"""Largest distance from the best mean validation accuracy."""
MIN_VARIATION = 0.1
"""Coefficient of variation of Δ over tokens from which a head selects."""
MIN_SELECTING_SHARE = 0.5
"""Share of a layer's heads that must select."""
MIN_FIRST_MEDIAN = 0.3
"""Least median over layer 0's heads of the coefficient of variation."""


def command(data: str, arm: str, seed: int, out: Path, device: str) -> str:
    """Return the words of `analyze train`."""
    if arm.endswith("warm"):
        start = f" {shlex.quote(str(out / name(data, 'mamba2', seed)))}"
    else:
        start = "" if data.startswith("planted") else f" {SIZES}"  # the planted tasks' own recipe has these sizes
    return f"{ARMS[arm]}{start} {RECIPES[data]} --device {device} --seed {seed}"


def fidelity_command(data: str, out: Path, device: str) -> str:
    """Return the words of `analyze fidelity` for a trained model, in float32 although it is stored in bfloat16."""
    where = "" if device == "cpu" else f" --device {device} --dtype float32"
    methods = ",".join(METHODS)
    return f"fidelity {out} --data {data} --split test --limit {LIMITS.get(data, 300)} --methods {methods}{where}"


def name(data: str, arm: str, seed: int) -> str:
    """Return a model's directory: the data set, the arm and the seed."""
    return f"{data}-{arm.replace('β=', '').replace(' ', '-')}-{seed}"


def train(arguments: argparse.Namespace) -> None:
    """Train the missing runs, seed by seed, then measure their fidelity."""
    trained = {(r["data"], r["arm"], r["seed"]) for r in results()}
    measured = {(r["data"], r["arm"], r["seed"]) for r in results() if r["delta"]}
    device = "cuda" if arguments.gpus else "cpu"
    arms = [arm for arm in ARMS if any(fnmatchcase(arm, pattern) for pattern in arguments.arms)]
    keys = [(data, arm, seed) for seed in arguments.seeds for data in arguments.data for arm in arms]
    needed = {name(data, "mamba2", seed) for data, arm, seed in set(keys) - trained if arm.endswith("warm")}
    if not arguments.no_fidelity:
        needed |= {name(*key) for key in set(keys) - measured}
    bases = [(d, "mamba2", s) for d, arm, s in keys if arm.endswith("warm")]  # named also where --arms leaves it out
    trainings = dict.fromkeys([key for key in bases if key not in keys] + keys)
    jobs = [_training(key, arguments.out, device, trained, needed) for key in trainings]
    if not arguments.no_fidelity:
        jobs += [_fidelity(key, arguments.out, device, measured) for key in keys]
    gpus = [str(gpu) for gpu in range(arguments.gpus)]
    running.run(jobs, (gpus or [""]) * arguments.cores, arguments.minutes)


Key = tuple[str, str, int]


def _training(key: Key, root: Path, device: str, trained: set[Key], needed: set[str]) -> running.Job:
    """Train one model. Those `needed` must have their weights in `root`, not only their line in the results."""
    data, arm, seed = key
    out = root / name(*key)
    line = f"train {command(*key, root, device)}"

    def done() -> bool:
        return key in trained and ((out / "training.json").exists() or out.name not in needed)

    def ended(seconds: float) -> None:
        if key not in trained:
            record = {"data": data, "arm": arm, "seed": seed, "seconds": round(seconds)}
            running.add(RESULTS, {**record, **accuracies(out), "delta": {}})

    return running.Job(
        out.name,
        [["-m", "ssmscope", *shlex.split(line), "--out", str(out)]],
        root / f"{out.name}.log",
        done,
        frozenset({name(data, "mamba2", seed)} if arm.endswith("warm") else ()),
        ended,
    )


def _fidelity(key: Key, root: Path, device: str, measured: set[Key]) -> running.Job:
    """Measure one trained model, and add its line again with ΔA of each method."""
    data, arm, seed = key
    out = root / name(*key)
    line, written = fidelity_command(data, out, device), out / "fidelity.json"

    def ended(seconds: float) -> None:
        record = {"data": data, "arm": arm, "seed": seed, "fidelity_command": f"analyze {line}"}
        found = json.loads(written.read_text())
        running.add(RESULTS, {**record, "fidelity_seconds": round(seconds), **accuracies(out), **found})

    return running.Job(
        f"{out.name} fidelity",
        [
            ["-m", "ssmscope", *shlex.split(line), "--out", str(out / "fidelity")],
            [__file__, "measure", "--out", str(out), "--into", str(written)],
        ],
        root / f"{out.name}.fidelity.log",
        partial(measured.__contains__, key),
        frozenset({out.name}),
        ended,
    )


def accuracies(out: Path) -> dict[str, Any]:
    """Return the fields of a line of results from `training.json`: accuracies, and the variation of Δ by head."""
    record = json.loads((out / "training.json").read_text())
    return {
        "command": record["command"],
        "epochs": record["epochs_run"],
        "best_epoch": record["best_epoch"],
        "parameters": record["parameters"],
        "validation": record["validation"]["accuracy"],
        "test": record["test"]["accuracy"],
        "selectivity": record["selectivity"]["layers"],
        "versions": record["versions"],
    }


def position(arguments: argparse.Namespace) -> None:
    """Measure what replaced regions cost the chosen Baleen-E and Mamba-2 trained as long, which must be in --out."""
    known = {(r["data"], r["arm"], r["seed"]) for r in running.read(POSITIONS)}
    keys = [(data, arm, seed) for data in TEXTS for arm in compared(data) for seed in SEEDS]
    running.run([_position(key, arguments.out, known) for key in keys], [""] * arguments.cores, arguments.minutes)


def _position(key: Key, root: Path, known: set[Key]) -> running.Job:
    data, arm, seed = key
    model = root / name(*key)
    line = f"position {model} --data {data} --limit {POSITION_TEXTS.get(data, 500)}"

    def ended(seconds: float) -> None:
        found = json.loads((model / "position" / "position.json").read_text())
        drops = {each["region"]: each["drop"]["value"] for each in found["regions"]}
        record = {"data": data, "arm": arm, "seed": seed, "command": f"analyze {line}", "seconds": round(seconds)}
        running.add(POSITIONS, {**record, "clean": found["clean"]["value"], "drops": drops})

    return running.Job(
        f"{model.name} position",
        [["-m", "ssmscope", *shlex.split(line), "--out", str(model / "position")]],
        root / f"{model.name}.position.log",
        partial(known.__contains__, key),
        ended=ended,
    )


def measure(arguments: argparse.Namespace) -> None:
    """Write ΔA of each method, read from the measurement of a trained model."""
    from ssmscope.interp.fidelity.result import Fidelity

    found = Fidelity.load(arguments.out / "fidelity" / "fidelity.json")
    deltas = found.estimates[:, found.measures.index("delta")]
    delta = dict(zip([*found.methods, "random"], deltas[:, 0].tolist(), strict=True))
    arguments.into.write_text(json.dumps({"texts": len(found.texts), "delta": delta}))


def results() -> list[dict[str, Any]]:
    """Return the latest line of every model; those that were trained and not measured have an empty `delta`."""
    return list({(r["data"], r["arm"], r["seed"]): r for r in running.read(RESULTS)}.values())


def arms_of(records: Iterable[dict[str, Any]]) -> list[str]:
    """Return the arms that have results, those of earlier grids last."""
    found = {r["arm"] for r in records}
    return [*(arm for arm in ARMS if arm in found), *sorted(found - set(ARMS))]


def selects(record: dict[str, Any]) -> bool:
    """Return True if the gates of a model select."""
    variations = [layer["variation"] for layer in record["selectivity"]]
    shares = [sum(v >= MIN_VARIATION for v in heads) / len(heads) for heads in variations]
    return min(shares) >= MIN_SELECTING_SHARE and statistics.median(variations[0]) >= MIN_FIRST_MEDIAN


def meeting(records: Sequence[dict[str, Any]], kind: str) -> list[str]:
    """Return a kind's arms that meet the criterion for β in all seeds, the most accurate first."""
    kept = [r for r in records if r["seed"] in SEEDS]
    arms = {arm: [r for r in kept if r["arm"] == arm] for arm in arms_of(kept)}
    full = {arm: statistics.mean(r["validation"] for r in f) for arm, f in arms.items() if len(f) == len(SEEDS)}
    best = max(full.values(), default=0.0)
    fit = [a for a in full if a.startswith(kind) and full[a] >= best - TOLERANCE and all(map(selects, arms[a]))]
    return sorted(fit, key=full.__getitem__, reverse=True)


def chosen(records: Sequence[dict[str, Any]], kind: str) -> str | None:
    """Return a kind's most accurate arm with β > 0 that meets the criterion, None if there is none."""
    return next((arm for arm in meeting(records, kind) if not arm.endswith("β=0")), None)


def choose(arguments: argparse.Namespace) -> None:
    """Print each arm's validation accuracy and variation of Δ by layer, and the arms that meet the criterion."""
    for data in RECIPES:
        records = [r for r in results() if r["data"] == data]
        if not records:
            continue
        layers = range(len(records[0]["selectivity"]))
        print(f"\n{data}\n")
        print("| arm | seeds | validation | " + " | ".join(f"Δ varies, layer {i} | selecting" for i in layers), end="")
        print(" | seeds that select |\n|---|---|---|" + "---|---|" * len(layers) + "---|")
        for arm in arms_of(records):
            found = [r for r in records if r["arm"] == arm]
            cells = [running.told([r["validation"] for r in found])]
            for i in layers:
                heads = [r["selectivity"][i]["variation"] for r in found]
                cells.append(running.told([statistics.median(h) for h in heads], 2))
                cells.append(f"{statistics.mean(statistics.mean(v >= MIN_VARIATION for v in h) for h in heads):.2f}")
            cells.append(f"{sum(map(selects, found))} of {len(found)}")
            print(f"| {arm} | {len(found)} | " + " | ".join(cells) + " |")
        for kind in ("baleen-e", "baleen-b"):
            print(f"\n{kind}: {chosen(records, kind)}; all that meet it: {', '.join(meeting(records, kind)) or 'none'}")


def table(arguments: argparse.Namespace) -> None:
    """Per data set the accuracies and ΔA × 100, mean ± half of the 95 % t interval over seeds."""
    records = results()
    for data in RECIPES:
        of_data = [r for r in records if r["data"] == data]
        if not of_data:
            continue
        best = {chosen(of_data, kind) for kind in ("baleen-e", "baleen-b")}
        arms = [
            arm for arm in arms_of(of_data) if arguments.all or arm in best or arm == "mamba2" or arm.endswith("=0")
        ]
        methods = [*METHODS, "random"]
        print(f"\n{data}, {LIMITS.get(data, 300)} texts\n")
        print("| arm | seeds | validation | test | selects | " + " | ".join(methods) + " |")
        print("|---|---|---|---|---|" + "---|" * len(methods))
        plain = {r["seed"]: r for r in of_data if r["arm"] == "mamba2"}
        for arm in arms:
            found = [r for r in of_data if r["arm"] == arm]
            shares = [sum(s["selective"] for s in r["selectivity"]) / len(r["selectivity"]) for r in found]
            cells = [running.told([r[part] for r in found]) for part in ("validation", "test")]
            cells += [f"{sum(shares) / len(shares):.2f}"]
            measured = [r["delta"] for r in found if r["delta"]]
            cells += [running.told([100 * delta[m] for delta in measured], 1) if measured else "" for m in methods]
            print(f"| {arm} | {len(found)} | " + " | ".join(cells) + " |")
        for arm in arms:
            found = [r for r in of_data if r["arm"] == arm and r["delta"] and plain.get(r["seed"], {}).get("delta")]
            if found and arm != "mamba2":
                cells = [running.told([r[p] - plain[r["seed"]][p] for r in found]) for p in ("validation", "test")]
                cells += [""] + [
                    running.told([100 * (r["delta"][m] - plain[r["seed"]]["delta"][m]) for r in found], 1)
                    for m in methods
                ]
                print(f"| {arm} − mamba2 | {len(found)} | " + " | ".join(cells) + " |")


def compared(data: str) -> tuple[str, str]:
    """Return the arms of Mamba-2 trained as long as the chosen Baleen-E, and of that."""
    best = chosen([r for r in results() if r["data"] == data], "baleen-e")
    assert best is not None
    return "mamba2 warm" if best.endswith("warm") else "mamba2", best


def docs_table() -> list[str]:
    """Return the lines of the documentation's table: per data set Mamba-2, Mamba-2 trained as long as a warm Baleen,
    and the chosen Baleens."""
    arms = {}
    for data in TEXTS:
        best = chosen([r for r in results() if r["data"] == data], "baleen-b")
        arms[data] = tuple(dict.fromkeys(("mamba2", *compared(data), *([best] if best else []))))
    return _fidelity_table(arms)


def _fidelity_table(arms_of_data: dict[str, tuple[str, ...]]) -> list[str]:
    """Return a table's lines: per data set the accuracy, the share of heads that select and ΔA × 100 of each arm."""
    lines = [
        f"| | | accuracy | heads that select | {' | '.join(f'`{m}`' for m in TABLED)} |",
        "|---|---|---|---|" + "---|" * len(TABLED),
    ]
    for data, arms in arms_of_data.items():
        of_data = [r for r in results() if r["data"] == data and r["seed"] in SEEDS]
        found = {arm: {r["seed"]: r for r in of_data if r["arm"] == arm} for arm in arms}
        for at, arm in enumerate(arms):
            seeds = list(found[arm].values())
            variations = [v for r in seeds for layer in r["selectivity"] for v in layer["variation"]]
            share = f"{sum(v >= MIN_VARIATION for v in variations) / len(variations):.2f}"
            columns = [[r["test"] for r in seeds], *([100 * r["delta"][m] for r in seeds] for m in TABLED)]
            lines.append(_row(data if at == 0 else "", arm, columns, share))
    return lines


Pairs = list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]
"""Per data set, the records of a Baleen and of the Mamba-2 beside it."""


def verdict_table() -> list[str]:
    """Return the lines of the documentation's table: what new seeds on SST-2 and Rotten Tomatoes, as one question,
    say of the chosen Baleen-E less Mamba-2 trained as long."""
    new = {(r["data"], r["arm"], r["seed"]): r for r in results()}
    pairs: Pairs = []
    for data in ("sst2", "rotten_tomatoes"):
        base, best = compared(data)
        pairs.append(([new[data, best, seed] for seed in NEW_SEEDS], [new[data, base, seed] for seed in NEW_SEEDS]))
    return _asked(pairs, {"accuracy × 100": lambda record: 100 * record["test"]}, 2.0, _faithful())


def methods_table() -> list[str]:
    """Return the lines of the documentation's table: what all seeds on SST-2 and Rotten Tomatoes, as one question, say
    of LRP less another method, and of a method less random scores, on the same models: Mamba-2 trained as long and the
    chosen Baleen-E, whose mean a seed's run is, since both begin from the same weights."""
    delta = {(r["data"], r["arm"], r["seed"]): r["delta"] for r in results()}

    def less(one: str, other: str) -> list[tuple[list[float], list[float]]]:
        found = []
        for data in ("sst2", "rotten_tomatoes"):
            runs = [[delta[data, arm, seed] for arm in compared(data)] for seed in (*SEEDS, *NEW_SEEDS)]
            found.append([100 * statistics.mean(each[one] - each[other] for each in both) for both in runs])
        return [(each, [0.0] * len(each)) for each in found]

    ahead = {Question(f"`lrp` less `{m}`", 5.0): less("lrp", m) for m in SHOWN if m != "lrp"}
    chance = {Question(f"`{m}` less random", 2.0): less(m, "random") for m in SHOWN if m != "lrp"}
    return told(verdicts(ahead | chance), 1)


def position_verdicts() -> list[str]:
    """Return what all data sets, as one question, say of the drops of the chosen Baleen-E less Mamba-2's, by region."""
    found = {(r["data"], r["arm"], r["seed"]): r for r in running.read(POSITIONS)}
    pairs = [tuple([found[data, arm, seed] for seed in SEEDS] for arm in reversed(compared(data))) for data in TEXTS]
    regions = next(iter(found.values()))["drops"]
    return _asked(pairs, {}, 2.0, {name: lambda r, at=name: 100 * r["drops"][at] for name in regions})


def _faithful() -> dict[str, Measure]:
    return {f"ΔA × 100, {m}": lambda record, m=m: 100 * record["delta"][m] for m in SHOWN}


def _asked(pairs: Pairs, exact: Mapping[str, Measure], margin: float, others: Mapping[str, Measure]) -> list[str]:
    """Return the verdicts on measures as one family: the `exact` ones with this margin, the others with 5."""
    family = {}
    for each, within in ((exact, margin), (others, 5.0)):
        for name, measure in each.items():
            family[Question(name, within)] = [([measure(r) for r in a], [measure(r) for r in b]) for a, b in pairs]
    return told(verdicts(family), 1)


def position_table() -> list[str]:
    """Return the lines of the documentation's table of replaced regions."""
    measured = {(r["data"], r["arm"], r["seed"]): r for r in running.read(POSITIONS)}
    regions = list(next(iter(measured.values()))["drops"])
    lines = [f"| | | clean | {' | '.join(regions)} |", "|---|---|---|" + "---|" * len(regions)]
    for data in TEXTS:
        of_arm = {arm: [measured[data, arm, seed] for seed in SEEDS] for arm in compared(data)}
        for at, (arm, found) in enumerate(of_arm.items()):
            columns = [[r["clean"] for r in found], *([100 * r["drops"][one] for r in found] for one in regions)]
            lines.append(_row(data if at == 0 else "", arm, columns))
    return lines


def _row(data: str, arm: str, columns: Sequence[Sequence[float]], *after_first: str) -> str:
    """Return a line of a table: mean ± interval over seeds of each column, the first an accuracy, others × 100."""
    first, *others = (running.told(values, 1 if at else 3) for at, values in enumerate(columns))
    return f"| {' | '.join([data, arm, first, *after_first, *others])} |"


def main() -> None:
    found = running.verbs(__doc__, train, measure, choose, table, position)
    found["train"].add_argument("data", nargs="+", choices=list(RECIPES))
    found["train"].add_argument(
        "--arms", nargs="+", default=["*"], help="patterns of the arms' names, such as 'baleen-e*'"
    )
    found["train"].add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    found["train"].add_argument("--cores", type=int, default=1, help="runs at a time, one core each")
    found["train"].add_argument("--gpus", type=int, default=0, help="run on them, --cores at a time on each")
    found["train"].add_argument("--no-fidelity", action="store_true", help="train and measure selectivity only")
    found["position"].add_argument("--out", type=Path, required=True)
    found["position"].add_argument("--minutes", type=float, default=6000.0, help="then what runs is cut short")
    found["position"].add_argument("--cores", type=int, default=1, help="runs at a time, one core each")
    found["table"].add_argument("--all", action="store_true", help="every β, not only the chosen")
    running.start(found)


if __name__ == "__main__":
    main()
