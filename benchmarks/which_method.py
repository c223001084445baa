"""Comparison of methods by what they find: layers, edges and positions of compiled models, whose truth is known, with
and without a layer that holds the answer and is never read.

    python benchmarks/which_method.py measure --out runs/which --into benchmarks/results/which-method.jsonl  # minutes
    python benchmarks/which_method.py circuits    # of the shipped models of stories, one hop and two, some minutes
    python benchmarks/which_method.py table

Every method scores layers, edges or positions of `PAIRS` inputs. An AUROC says how well its scores tell the true ones
from all others: of layers by the largest score in a layer, of edges by the size of the mean, of positions input by
input. A true position is that of a value which the answer is read from; its key and the last token, which ask for it,
count as neither. A line of the results is a model and a seed of inputs. The tables have means over models, with 95 % t
intervals over the seeds; the verdicts' questions were declared before the runs.

A circuit of stories is chosen by exact scores from `STORY_PAIRS` solved stories: of one hop, in which the place is
changed, and of two, in which it is, or the person who took the object (see planted.py). The overlap of two circuits is
the number of edges in both, divided by that in either: between the seeds, and with the circuit of one hop.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import planted
import running
import verdicts
from scipy.stats import rankdata
from ssmscope.data.babi import questions
from ssmscope.data.pairs import PairData
from ssmscope.data.stories import PLACES

RESULTS = Path(__file__).parent / "results" / "which-method.jsonl"
CIRCUITS = RESULTS.with_name("story-circuits.jsonl")
STORY_PAIRS, STORY_SEEDS = 16, range(3)
HOPS = {"one": "one hop, place", "place": "two hops, place", "person": "two hops, person"}
PAIRS, SEEDS, MARGIN = 12, range(5), 0.05
SCORINGS = ("exact", "integrated", "gradient")
DIRECTIONS = ("noise", "denoise")
TOKENS = ("lrp", "ig", "occlusion")
COLUMNS = ("layers", "edges", "positions")
QUESTIONS = (
    ("circuit, integrated", "circuit, gradient", "edges"),
    ("patch, noise", "patch, denoise", "positions"),
    ("knockout", "occlusion", "positions"),
    ("knockout", "implicit attention", "positions"),
    ("knockout", "survival", "positions"),
    ("knockout", "survival", "layers"),
    ("occlusion", "lrp", "positions"),
    ("occlusion", "ig", "positions"),
)
"""Pairs of methods, and the column in which the second is subtracted from the first."""

Scores = Mapping[str, np.ndarray]
"""Scores by method, of layers (layers,) or of positions (inputs, length)."""


def auroc(scores: Sequence[float], true: Sequence[bool]) -> float:
    """Return the share of pairs of a true and another item in which the true one scores higher; ties count half."""
    values, own = np.asarray(scores, float), np.asarray(true, bool)
    ranks = rankdata(np.round(values / (np.abs(values).max() or 1.0), 6))
    count = own.sum()
    return float((ranks[own].sum() - count * (count + 1) / 2) / (count * (~own).sum()))


def found_in(made: Any, seed: int) -> dict[str, dict[str, float]]:
    """Return the AUROC of every method on a compiled model, by column; a column without other items is left out."""
    import ssmscope
    from ssmscope.zoo.compiled import pairs_of

    model, pairs = ssmscope.load(made.module), pairs_of(made.task.name, PAIRS, seed)
    found: dict[str, dict[str, float]] = {column: {} for column in COLUMNS}
    layers = [f"mixer {number}" for number in range(model.num_layers)]
    true = [layer in made.nodes for layer in layers]
    by_layer, by_position = parts_and_positions(model, pairs)
    for method in SCORINGS:
        circuit = ssmscope.circuit(model, data=pairs, method=method, random=0)
        size = np.abs(circuit.scores[:, 0])
        found["edges"][f"circuit, {method}"] = auroc(size, [edge in made.edges for edge in circuit.edges])
        sent = [max(s for s, edge in zip(size, circuit.edges) if edge.sender == layer) for layer in layers]
        by_layer[f"circuit, {method}"] = np.array(sent)
    for method, scores in by_layer.items() if not all(true) else ():
        found["layers"][method] = auroc(scores, true)
    for method, each in by_position.items():
        of_inputs = []
        for ids, row in zip(pairs.clean, each):
            values, keys = made.positions(ids)
            counted = [at for at in range(len(ids) - 1) if at not in keys]
            of_inputs.append(auroc(row[counted], [at in values for at in counted]))
        found["positions"][method] = statistics.mean(of_inputs)
    return found


def parts_and_positions(model: Any, pairs: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the scores of layers, and of every input's positions, by method."""
    import ssmscope
    from ssmscope.interp.pairs import encode_pairs
    from ssmscope.interp.patch.over_pairs import PairGrids

    batch = model.encode(ids=[list(ids) for ids in pairs.clean])
    every, length = range(len(pairs)), batch.lengths[0]
    layers: dict[str, np.ndarray] = {}
    positions: dict[str, np.ndarray] = {}
    same = [{at: at for at in range(length)} for _ in every]
    for direction in DIRECTIONS:
        grids = PairGrids(encode_pairs(model, pairs), direction, same)
        _, whole = grids.grid("output", {"text": [tuple(range(length)) for _ in every]})
        layers[f"patch, {direction}"] = np.abs(whole[..., 0]).mean(0)
        _, each = grids.grid("residual", {str(at): [(at,) for _ in every] for at in range(length)})
        positions[f"patch, {direction}"] = np.abs(each[:, 0])
    cut = ssmscope.knockout(model, batch, from_=list(range(length)), window=1)
    falls = cut.probability[:, None, None] - cut.probabilities
    layers["knockout"], positions["knockout"] = falls[..., 1:].max(1).mean(0), falls[..., 0]
    attention = ssmscope.attention(model, batch, rows="last")
    maps = np.abs([[one.values[-1] for one in text.maps] for text in attention])
    layers["implicit attention"], positions["implicit attention"] = maps.max(2).mean(0), maps.mean(1)
    for method in ("survival", "readable"):
        shares = (layer.survival(readable=method == "readable") for layer in model.trace(batch).layers)
        left = np.stack([share.double().numpy() for share in shares], 1)
        layers[method], positions[method] = left.max(2).mean(0), left.mean(1)
    for text in ssmscope.explain(model, batch, methods=TOKENS, target=list(pairs.targets)):
        for each in text.attributions:
            positions.setdefault(each.method, np.empty((0, length)))
            positions[each.method] = np.vstack([positions[each.method], each.scores])
    return layers, positions


def measure(arguments: argparse.Namespace) -> None:
    """Measure all compiled models that are not in the file yet."""
    from ssmscope.zoo.compiled import FAMILIES, TASKS, compiled

    done = {(r["task"], r["family"], r["decoy"], r["seed"]) for r in running.read(arguments.into)}
    every = [(t, f, d, s) for s in SEEDS for t in TASKS for f in FAMILIES for d in (False, True)]
    for task, family, decoy, seed in every:
        if (task, family, decoy, seed) not in done:
            found = found_in(compiled(task, family, decoy=decoy), seed)
            rounded = {column: {m: round(v, 6) for m, v in own.items()} for column, own in found.items()}
            running.add(
                arguments.into,
                {"task": task, "family": family, "decoy": decoy, "seed": seed, "pairs": PAIRS, **rounded},
            )


def one_hop(seed: int) -> Iterator[planted.Pair]:
    """Stories in which the asked person's last place is changed for one that is not named otherwise."""
    random = np.random.default_rng(seed)
    for one in questions("qa1", length=0, examples=2000, split="test", facts=(2, 4), seed=seed).examples:
        walk = next(fact for fact in one.facts if fact.supporting)
        other = str(random.choice([place for place in PLACES if place not in one.context]))
        yield planted.replaced(one, walk.last_word - 2, other, (one.answer, other), PLACES)


def circuits(arguments: argparse.Namespace) -> None:
    """Find the circuits of stories in the shipped models."""
    import ssmscope

    done = {(r["model"], r["hops"], r["seed"]) for r in running.read(CIRCUITS)}
    stories = {"one": one_hop, **planted.STORIES}
    for name in planted.SHIPPED:
        model = ssmscope.load(name)
        for hops in HOPS:
            for seed in STORY_SEEDS:
                if (name, hops, seed) in done:
                    continue
                solved = planted.solved(model, (each.encoded(model) for each in stories[hops](seed)), STORY_PAIRS)
                right, wrong = zip(*(each.answers for each in solved))
                clean, corrupted = (tuple(tuple(getattr(p, own)) for p in solved) for own in ("clean", "corrupted"))
                found = ssmscope.circuit(model, data=PairData(hops, clean, corrupted, right, wrong), random=10)
                record = {"model": name, "hops": hops, "seed": seed, "pairs": len(solved), "edges": len(found.edges)}
                record |= {"faithfulness": float(found.faithfulness[0]), "random": float(found.random.max())}
                running.add(CIRCUITS, {**record, "circuit": [edge.name for edge in found.circuit]})


def overlap(one: Sequence[str], other: Sequence[str]) -> float:
    return len({*one} & {*other}) / len({*one} | {*other})


def circuits_table() -> list[str]:
    """Return the lines of the table of stories' circuits, means over the seeds of stories."""
    lines = ["| | | edges | faithfulness | overlap of draws | with one hop |"]
    lines.append("|---" * 6 + "|")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in running.read(CIRCUITS):
        found.setdefault((r["model"], r["hops"]), []).append(r)
    for (model, hops), own in found.items():
        chosen, single = ([r["circuit"] for r in found[model, each]] for each in (hops, "one"))
        same = statistics.mean(overlap(a, b) for a, b in itertools.combinations(chosen, 2))
        other = statistics.mean(overlap(a, b) for a, b in itertools.product(chosen, single))
        cells = [f"{min(map(len, chosen))}–{max(map(len, chosen))} of {own[0]['edges']}"]
        cells += [running.told([r["faithfulness"] for r in own], 2), f"{same:.2f}"]
        cells.append("" if hops == "one" else f"{other:.2f}")
        lines.append(f"| {model} | {HOPS[hops]} | {' | '.join(cells)} |")
    return lines


def over_seeds(column: str, method: str) -> list[float]:
    """Return the mean over models, seed by seed, of a method's AUROC; an empty list where it gives no such scores."""
    found: dict[int, list[float]] = {}
    for r in running.read(RESULTS):
        if method in r[column]:
            found.setdefault(r["seed"], []).append(r[column][method])
    return [statistics.mean(own) for own in found.values()]


def methods_table() -> list[str]:
    """Return the lines of the table of AUROC by method: of layers where there is a decoy, of edges and positions in all
    models."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    records = running.read(RESULTS)
    methods = dict.fromkeys(m for column in COLUMNS for r in records if r["decoy"] for m in r[column])
    for method in methods:
        own = [over_seeds(column, method) for column in COLUMNS]
        lines.append(f"| {method} | " + " | ".join(running.told(v) if v else "–" for v in own) + " |")
    return lines


def verdict_table() -> list[str]:
    """Return the lines of the verdicts on the declared questions, over all models."""
    family = {
        verdicts.Question(f"{column}: {one} less {other}", MARGIN): [
            (over_seeds(column, one), over_seeds(column, other))
        ]
        for one, other, column in QUESTIONS
    }
    return verdicts.table(verdicts.verdicts(family))


def table(arguments: argparse.Namespace) -> None:
    """Print the tables, and the AUROC below 1 by task and architecture."""
    print(*methods_table(), "", *verdict_table(), "", *circuits_table(), "", sep="\n")
    for line in by_model():
        print(line)


def by_model() -> Iterator[str]:
    found: dict[Any, list[float]] = {}
    for r in running.read(RESULTS):
        for column in COLUMNS:
            for method, value in r[column].items():
                found.setdefault((column, method, r["task"], r["family"], r["decoy"]), []).append(value)
    for at, values in found.items():
        if min(values) < 1:
            yield f"{', '.join(map(str, at))}: {running.told(values)}"


def main() -> None:
    running.start(running.verbs(__doc__, measure, circuits, table))


if __name__ == "__main__":
    main()
