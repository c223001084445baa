"""Integrated Gradients against an adaptive quadrature in float64: is every score that is called converged right?

    python benchmarks/integrated_gradients.py                                 # every shipped classifier of texts
    python benchmarks/integrated_gradients.py demo/sst2-mamba2 --texts 5 --baseline mean --special

Reads SST-2's test split from $SSMSCOPE_DATA or the hub. Every model explains the same texts, by `ig` in float32 as it
is called by default, and by the reference: a Gauss–Kronrod rule (QUADPACK's qk15) on pieces that are halved until the
rule and the Gauss rule within it agree on every token to 1e-4 of the largest score, all pieces together, and the sum of
the scores misses no more of f's change on them. It is in float64 throughout: transformers' norms, which compute in
float32 whatever the weights are, are made to follow (where a path passes a norm's singular point their rounding alone
moves f by 0.3 % of the largest score). It shares the model's own gradient with `ig` and nothing else; `--check`
compares it with `scipy.integrate.quad_vec`.

The columns: texts called converged; the largest error of a score of those texts, as a share of their largest |score|;
texts of those whose rankings are right, in that no pair of tokens whose true scores differ by more than the tolerance
stands in the wrong order, and how many equal the true ranking outright (the others differ in pairs that the reference
scores alike to within 1 %); of the texts that are not called converged, how many are indeed off by more than the
tolerance; gradients a text; seconds of CPU of both.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from timing import THREADS, machine
from torch import Tensor
from torch.overrides import TorchFunctionMode
import ssmscope
from ssmscope.core.known_models import demos
from ssmscope.data.text import load_text
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.methods.integrated import ig
from ssmscope.interp.objective import Objective, objective

TOLERANCE = 0.01
NOISE = 1e-12
"""As a share of f, what its rounding may be."""
DATA = ("sst2", "imdb", "snli")

# QUADPACK's qk15: the positive nodes and the middle, their Kronrod weights, and the Gauss weights of every second one
NODES = (
    *(0.991455371120812639206854697526329, 0.949107912342758524526189684047851, 0.864864423359769072789712788640926),
    *(0.741531185599394439863864773280788, 0.586087235467691130294144691258520, 0.405845151377397166906606412076961),
    *(0.207784955007898467600689403773245, 0.0),
)
KRONROD = (
    *(0.022935322010529224963732008058970, 0.063092092629978553290700663189204, 0.104790010322250183839876322541518),
    *(0.140653259715525918745189590510238, 0.169004726639267902826583426598550, 0.190350578064785409913256402421014),
    *(0.204432940075298892414161999234649, 0.209482141084727828012999174891714),
)
GAUSS = (
    *(0.129484966168869693270611432679082, 0.279705391489276667901467771423780, 0.381830050505118944950369775488975),
    0.417959183673469387755102040816327,
)


def rule() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes in (−1, 1), Kronrod's and Gauss's weights; exact to degree 22 and 13."""
    nodes = np.array([*(-x for x in NODES[:-1]), *NODES[::-1]])
    kronrod, gauss = np.array([*KRONROD[:-1], *KRONROD[::-1]]), np.zeros(15)
    gauss[1::2] = [*GAUSS[:-1], *GAUSS[::-1]]
    assert abs(kronrod @ nodes**22 - 2 / 23) < 1e-14 and abs(gauss @ nodes**12 - 2 / 13) < 1e-14
    return nodes, kronrod, gauss


@dataclass(eq=False)
class Piece:
    text: int
    first: float
    last: float
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0))
    errors: np.ndarray = field(default_factory=lambda: np.zeros(0))


def reference(
    found: Objective, start: Tensor, end: Tensor, *, accuracy: float = 1e-4, pieces: int = 8, most: int = 20_000
) -> tuple[list[np.ndarray | None], list[int]]:
    """Every text's scores and how many gradients they took; all of them in float64. A text that takes more than `most`
    has no reference."""
    nodes, kronrod, gauss = rule()
    done: list[list[Piece]] = [[] for _ in range(len(found))]
    spent, unsure = [0] * len(found), set[int]()
    todo = [Piece(text, i / pieces, (i + 1) / pieces) for text in range(len(found)) for i in range(pieces)]
    while todo:
        for part in found.batches([piece.text for piece in todo for _ in nodes][:: len(nodes)]):
            for few in range(0, len(part), 16):
                chosen = [todo[place] for place in part[few : few + 16]]
                slopes = _slopes(found, start, end, chosen, nodes)
                for piece, values in zip(chosen, slopes, strict=True):
                    half = (piece.last - piece.first) / 2
                    piece.scores = half * kronrod @ values
                    piece.errors = np.abs(piece.scores - half * gauss @ values)
                for piece, change in zip(chosen, _changes(found, start, end, chosen), strict=True):
                    # a peak between the nodes is in neither rule, but f has changed by it
                    missed = abs(piece.scores.sum() - change[0])
                    piece.errors = np.maximum(piece.errors, max(missed - NOISE * change[1], 0.0))
                for piece in chosen:
                    done[piece.text].append(piece)
                    spent[piece.text] += len(nodes)
        asked, todo = sorted({piece.text for piece in todo}), []
        for text in asked:
            own = done[text]
            allowed = accuracy * np.abs(sum(piece.scores for piece in own)).max()
            if sum(piece.errors for piece in own).max() <= allowed:
                continue
            if spent[text] > most:
                unsure.add(text)
                continue
            wide = [piece for piece in own if piece.errors.max() > allowed / (2 * len(own))]
            gone = set(map(id, wide))
            done[text] = [piece for piece in own if id(piece) not in gone]
            middles = [(piece, (piece.first + piece.last) / 2) for piece in wide]
            todo += [Piece(text, piece.first, middle) for piece, middle in middles]
            todo += [Piece(text, middle, piece.last) for piece, middle in middles]
    scores = [None if text in unsure else sum(piece.scores for piece in own) for text, own in enumerate(done)]
    return scores, spent


def _changes(found: Objective, start: Tensor, end: Tensor, pieces: list[Piece]) -> list[tuple[float, float]]:
    """Per piece f at its end − f at its beginning, and the size of both together."""
    texts = [piece.text for piece in pieces for _ in range(2)]
    longest = max(found.lengths[piece.text] for piece in pieces)
    places = [place for piece in pieces for place in (piece.first, piece.last)]
    e, b = end[texts, :longest], start[texts, :longest]
    with torch.no_grad():
        values = found(b + torch.tensor(places, dtype=e.dtype).view(-1, 1, 1) * (e - b), texts)
    return [(b - a, abs(a) + abs(b)) for a, b in values.view(-1, 2).tolist()]


def _slopes(found: Objective, start: Tensor, end: Tensor, pieces: list[Piece], nodes: np.ndarray) -> list[np.ndarray]:
    """Per piece the integrand at its nodes, (nodes, tokens)."""
    texts = [piece.text for piece in pieces for _ in nodes]
    longest = max(found.lengths[piece.text] for piece in pieces)
    places = [(piece.first + piece.last + (piece.last - piece.first) * node) / 2 for piece in pieces for node in nodes]
    e, b = end[texts, :longest], start[texts, :longest]
    points = b + torch.tensor(places, dtype=e.dtype).view(-1, 1, 1) * (e - b)
    slopes = (found.gradient(points, texts) * (e - b)).sum(-1).view(len(pieces), len(nodes), -1).numpy()
    return [values[:, : found.lengths[piece.text]] for piece, values in zip(pieces, slopes, strict=True)]


def by_scipy(found: Objective, start: Tensor, end: Tensor, text: int) -> np.ndarray:
    """Compute the reference of one text by `scipy.integrate.quad_vec`."""
    from scipy.integrate import quad_vec

    def slopes(place: float) -> np.ndarray:
        return _slopes(found, start, end, [Piece(text, place, place)], np.zeros(1))[0][0]

    return quad_vec(slopes, 0, 1, epsabs=0, epsrel=1e-6, norm="max", limit=2000)[0]


@dataclass
class Verdict:
    texts: int
    converged: int
    error: float
    ordered: int
    exact: int
    rightly_doubted: int
    spent: list[int]


def judged(found: Objective, scores: Scores, true: list[np.ndarray | None]) -> Verdict:
    """Compare `ig` with the truth."""
    verdict = Verdict(len(true), 0, 0.0, 0, 0, 0, scores.steps.tolist())
    for text, expected in enumerate(true):
        if expected is None:
            if bool(scores.converged[text]):
                raise RuntimeError(f"text {text} is called converged, and the reference is not")
            continue
        own = scores.scores[text, : len(expected)].double().numpy()
        largest = np.abs(expected).max()
        error = float(np.abs(own - expected).max() / largest)
        if not bool(scores.converged[text]):
            verdict.rightly_doubted += error > TOLERANCE
            continue
        verdict.converged += 1
        verdict.error = max(verdict.error, error)
        ordinary = [place for place, word in enumerate(found.batch.words[text]) if word is not None]
        own, expected = own[ordinary], expected[ordinary]
        apart = expected[:, None] - expected[None, :] > TOLERANCE * largest
        verdict.ordered += bool((own[:, None] > own[None, :])[apart].all())
        order = [np.argsort(-values, kind="stable").tolist() for values in (own, expected)]
        verdict.exact += order[0] == order[1]
    return verdict


class Double(TorchFunctionMode):
    """Keep float64, within the context, from being made float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.to:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()}
        return func(*args, **kwargs)


def path_of(found: Objective, baseline: str, special: bool) -> tuple[Tensor, Tensor]:
    end = found.embeddings()
    start = baseline_embeddings(found, baseline).to(end)
    if not special:
        for text, words in enumerate(found.batch.words):
            kept = [place for place, word in enumerate(words) if word is None]
            start[text, kept] = end[text, kept]
    return start, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="by default every shipped classifier of texts")
    parser.add_argument("--texts", type=int, default=25)
    parser.add_argument("--baseline", default="neutral")
    parser.add_argument("--special", action="store_true", help="special tokens move too")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cap", type=int, default=1500)
    parser.add_argument("--check", action="store_true", help="compare the reference of one text with scipy's")
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    names = options.models or [name for name in sorted(demos()) if name.split("/")[1].startswith(DATA)]
    texts = list(load_text("sst2", "test").sample(options.texts, seed=0).texts)
    special = "move" if options.special else "stay"
    print(f"{len(texts)} texts of SST-2, baseline {options.baseline}, special tokens {special}\n")
    heads = ("model", "converged", "largest error %", "no inversion", "exact ranking", "doubted, and off")
    heads += ("gradients: median (most)", "ig s", "reference s")
    print("|" + "|".join(f" {head} " for head in heads) + "|\n" + "|---" * len(heads) + "|", flush=True)
    for name in names:
        model = ssmscope.load(name, dtype="float32")
        found = objective(model, model.encode(texts))
        begun = time.process_time()
        scores = ig(found, baseline=options.baseline, special=options.special, steps=options.steps, cap=options.cap)
        between = time.process_time()
        twin = ssmscope.load(name)
        twin.module.double()
        exactly = replace(found, model=twin)
        with Double():
            start, end = path_of(exactly, options.baseline, options.special)
            true, _ = reference(exactly, start, end)
        ended = time.process_time()
        if options.check:
            with Double():
                off = np.abs(by_scipy(exactly, start, end, 0) - true[0]).max() / np.abs(true[0]).max()
            print(f"  the reference of text 1 is scipy's to {off:.1e}")
        seen = judged(found, scores, true)
        doubted = seen.texts - seen.converged
        cells = (
            *(name.split("/")[-1], f"{seen.converged} of {seen.texts}", f"{100 * seen.error:.3f}", seen.ordered),
            *(seen.exact, f"{doubted}, {seen.rightly_doubted}"),
            f"{np.median(seen.spent):.0f} ({max(seen.spent)})",
            *(f"{between - begun:.1f}", f"{ended - between:.1f}"),
        )
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
