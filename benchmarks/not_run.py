"""Runs that were not made, with their cost: seconds of runs alike that were made, on one H100 or H200, times their
number. What ran several at a time is counted as such; other lengths, depths and epochs are in proportion."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from statistics import mean

import mad_every_token
from running import read

RESULTS = Path(__file__).with_name("results")


def seconds(file: str, *starts: str, key: str = "run", **equal: object) -> list[float]:
    """Return the seconds of a file's runs whose name begins so."""
    rows = (
        row for row in read(RESULTS / f"{file}.jsonl") if all(row.get(name) == each for name, each in equal.items())
    )
    return [row["seconds"] for row in rows if row.get("seconds") and str(row[key]).startswith(starts or ("",))]


def of_a_card(start: str) -> float:
    """Return the mean seconds of a card that a run of MAD's recall took whose name begins so."""
    rows = [row for row in read(mad_every_token.RESULTS) if "at_once" in row and row["run"].startswith(start)]
    return mean(row["seconds"] / row["at_once"] for row in rows)


def by_name(file: str) -> dict[str, float]:
    """Return the mean seconds of a file's runs of one name but for the seed."""
    found: dict[str, list[float]] = {}
    for row in read(RESULTS / f"{file}.jsonl"):
        if row.get("seconds"):
            found.setdefault(row["run"].rpartition("-")[0], []).append(row["seconds"])
    return {name: mean(each) for name, each in found.items()}


def cost(total: float, at_once: int = 1) -> str:
    """Write seconds as minutes, or hours from two on."""
    minutes = total / at_once / 60
    said = f"{minutes / 60:.1f} hours" if minutes >= 120 else f"{minutes:.0f} minutes"
    return said + (f", {at_once} at a time" if at_once > 1 else "")


def table() -> list[str]:
    """Return the lines of the documentation's table."""
    later = {each: mad_every_token.missing(*each) for each in product(mad_every_token.TASKS, mad_every_token.STAGES[1])}
    left, new = sum(later.values()), len(later) * mad_every_token.SEEDS
    recall = sum(number * of_a_card(f"{task}-{arm}-") for (task, arm), number in later.items())
    names = ("fuzzy", "noisy", "associative", "compression", "selective", "memorization")
    mad = sum(each for name, each in by_name("reference").items() if name.startswith(names))
    instruct = sum(each for name, each in by_name("reference").items() if name.startswith("instruct"))
    depth = sum(mean(seconds("mad-every-token", f"fuzzy-recall-{arm}-")) for arm in ("mamba2", "diff-mamba"))
    grouped = mean(seconds("reference", "fuzzy-recall-groupmamba-k4-"))
    cifar = {
        arm: mean(seconds("baleen-cifar10", arm, key="arm", arm=arm))
        for arm in {row["arm"] for row in read(RESULTS / "baleen-cifar10.jsonl")}
    }
    soft, hard = cifar["baleen-b-soft"], cifar["baleen-b"]
    reviews = [r["stack_seconds"] for r in read(RESULTS / "experiments-authors.jsonl") if r["length"] == 1500]
    planted = mean(seconds("planted-rationales", key="task"))
    epochs = mean(seconds("baleen-texts", "planted-position", key="data"))
    filtered = sum(seconds("gfssm", key="arm"))
    prompts = sum(seconds("prompts")) / 3
    rows = [
        (f"{left} of {new} new seeds of GroupMamba, GFSSM and `diff-s6` on MAD's recall, every token",
         "whether they differ from Mamba-2", f"{cost(recall)}, many at a time"),
        ("two more seeds of MAD's other tables", "verdicts instead of cases", cost(2 * mad, 2)),
        ("GroupMamba on selective copying, k = 2, 4 and 8, and k = 8 elsewhere, five seeds", "Tables 3 and 4",
         cost(5 * 8 * grouped)),
        ("6 and 12 layers of Diff-Mamba and Mamba-2 on fuzzy recall, five seeds, with steps to a given loss",
         "whether depth matters; which converges faster", cost(5 * depth * (6 + 12) / 4)),
        ("two more seeds of ten arms on CIFAR-10", "verdicts instead of cases", cost(2 * sum(cifar.values()))),
        ("Baleen-B with the KL summed, β .1, .3, 1, hard and soft, 30 epochs, two seeds; the best five times",
         "which β selects", cost(0.3 * 2 * 3 * (soft + hard) + 5 * max(soft, hard))),
        ("CIFAR-10 at a learning rate of 1e-3: Mamba-2, Baleen-E with β = .5 and .005, five seeds",
         "whether there is more to save", cost(5 * (cifar["mamba2"] + cifar["baleen-e"] + cifar["baleen-e-paper"]))),
        ("soft Baleen-B with and without the KL, five more seeds", "its gain under pixel noise",
         cost(5 * (soft + cifar["baleen-b-soft-0"]))),
        ("Baleen-E on planted position for 8 and 12 epochs, five seeds", "whether the epochs decide what it selects",
         cost(10 * epochs)),
        ("two more seeds of planted reasons (CPU), of GFSSM's stream, of attacks on prompts", "verdicts, not cases",
         f"{cost(2 * 48 * planted)}; {cost(2 * filtered / 3)}; {cost(2 * (instruct + prompts))}"),
        ("IMDb for 30 epochs at the paper's other fourteen T to 2,000", "Figure 2",
         cost(reviews[0] / 1500 * sum(T for T in range(100, 2001, 100) if T not in (100, 200, 300, 500, 1000, 1500)))),
        ("two more seeds of each model of bAbI: retrieval to 64,000, needle, implicit attention; WNLI",
         "Figures 4, 6 and 8, Table 4", "not timed"),
        ("models of 370 million to 7 billion parameters", "the papers' own tables", "not possible here"),
    ]  # fmt: skip
    rows = rows if left else rows[1:]
    return ["| run | would decide | cost |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
