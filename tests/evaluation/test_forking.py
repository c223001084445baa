"""Places where runs fork, on trees made by hand; and pieces of random trees, which are their rows.

Ends of answers, and continuations of every text from its own state, with each next token written down.
Sizes of batches that run together, and of the states of a row.
Runs from states of shared beginnings are the whole runs, for every architecture.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluation.slow import LANGUAGE, PHRASES, TEXTS, WORDS, labels_of, language_model, slow_likelihoods
from examples import HYBRIDS, random_example
from exhaustive import few
from loud import TrueFloat64, loud

from ssmscope.core import token_runs
from ssmscope.core.batching import LAYER_NUMBERS_PER_WIDTH
from ssmscope.core.model import Model, Run
from ssmscope.core.trace import LayerState, size
from ssmscope.data.language import byte_tokenizer
from ssmscope.evaluation import Evaluator, forking, running
from ssmscope.evaluation.forking import Pieces, Rows, as_bytes, token_rows, ways_to_fork, whole_rows
from ssmscope.evaluation.running import Answers

P, Q = list(range(100, 110)), list(range(200, 208))  # 10 and 8 tokens


def rows_of(*rows: list[int]) -> Rows:
    return Rows.of(sorted(as_bytes(rows)))


def forked(rows: Rows, *, fewer: float = 1) -> Pieces:
    return next(ways_to_fork(rows, (fewer,)))


def test_rows_are_what_they_were():
    given = [[5, 1, 70000], [2], [5, 1]]
    rows = Rows.of(as_bytes(given))
    assert rows.ids.tolist() == [5, 1, 70000, 2, 5, 1] and rows.lengths.tolist() == [3, 1, 2] and len(rows) == 3
    ids, real = rows.padded(np.array([2, 0, 1]), np.array([0, 1, 0]), np.array([2, 3, 1]))
    assert ids.tolist() == [[5, 1], [1, 70000], [2, 0]] and real.tolist() == [[True, True], [True, True], [True, False]]
    assert sorted(as_bytes(given)) == as_bytes(sorted(given))


@pytest.mark.parametrize("at_once", [1, 7, 2**22])
def test_what_neighbours_share(monkeypatch, at_once):
    monkeypatch.setattr(forking, "MAX_TOKENS_COMPARED", at_once)
    rows = rows_of([1, 2, 3], [1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 0], [2], [2, 0, 0, 0, 0])
    assert rows.shared().tolist() == [0, 3, 2, 3, 0, 1]
    assert rows_of([1, 2], [1, 2], [1, 2, 3]).shared().tolist() == [0, 2, 2]
    assert Rows.of([]).shared().tolist() == [] and rows_of([3]).shared().tolist() == [0]


@pytest.mark.parametrize(
    "rows, tokens",
    [
        ([P + [1] * 5, P + [2] * 5, P + [3] * 5], 10 + 3 * 5),
        ([P[:8] + [1], P[:8] + [2]], 8 + 2),
        ([P[:7] + [1], P[:7] + [2]], 2 * 8),  # too short to fork for
        ([P + Q + [1], P + Q + [2], P + [3], P + [4]], 10 + 8 + 4),
        ([P + Q[:7] + [1], P + Q[:7] + [2], P + [3]], 10 + 2 * 8 + 1),  # the second fork would be too near
        ([P[:7] + [1], P[:7] + [2], P[:5] + [3] * 4 + [1], P[:5] + [3] * 4 + [2]], 2 * 8 + 9 + 2),  # counted from 0
        ([P, P + [1, 2]], 10 + 2),  # a row that another one goes on from
        ([[1], [1, 2], [1, 2, 3]], 3),
        ([P, P + [1, 2], P + Q + [3], P + Q + [4]], 10 + 2 + 8 + 2),
        ([[1, 2], [3, 4]], 4),
        ([[*P[:5], i] for i in range(87)], 5 + 87),  # short, and shared by many: 86 · 5 − 87 · 2 = 256
        ([[*P[:5], i] for i in range(86)], 86 * 6),
    ],
)
def test_trees_made_by_hand(rows, tokens):
    assert forked(rows_of(*rows)).tokens == tokens
    assert whole_rows(rows_of(*rows)).tokens == sum(map(len, rows))


def test_levels_and_what_is_kept():
    pieces = forked(rows_of(P + Q + [1], P + Q + [2], P + [3], [9]))
    found = {
        (int(start), int(stop), int(level), bool(kept), bool(ends), int(pieces.stop[above]) if above >= 0 else None)
        for start, stop, level, kept, ends, above in zip(
            pieces.start, pieces.stop, pieces.level, pieces.kept, pieces.ends, pieces.above
        )
    }
    assert found == {
        (0, 10, 0, True, False, None),
        (0, 1, 0, False, True, None),
        (10, 18, 1, True, False, 10),
        (10, 11, 1, False, True, 10),
        (18, 19, 2, False, True, 18),
    }


def test_a_fork_costs_a_batch(monkeypatch):
    """Runs fork where tokens are saved that are more than what further batches cost."""
    shared = list(range(300, 340))
    rows = rows_of(*[[*shared, end] for end in range(6)], [*shared, *P, 1], [*shared, *P, 2])

    def tokens(batch: int, held: int = 100) -> int:
        monkeypatch.setattr(running, "max_batch_padding", lambda model: batch)
        model = SimpleNamespace(labels=("no", "yes"))
        return running.plan_pieces(model, rows, tokens_at_once=10_000, states_at_once=held).tokens

    assert tokens(0) == forked(rows).tokens == 40 + 6 + 10 + 2
    assert tokens(100) == forked(rows, fewer=4).tokens == 40 + 6 + 2 * 11
    assert tokens(1000) == tokens(100, held=1) == whole_rows(rows).tokens == 6 * 41 + 2 * 51


@pytest.mark.parametrize("apart, saved", [(1, 0), (3, 10), (8, 256)])
def test_the_pieces_of_every_row_are_the_row(monkeypatch, apart, saved):
    monkeypatch.setattr(forking, "MIN_FORK_DISTANCE", apart)
    monkeypatch.setattr(forking, "MIN_TOKENS_SAVED", saved)
    draw = np.random.default_rng(3)
    for _ in range(60):
        alphabet = int(draw.integers(1, 4))
        given = {tuple(draw.integers(0, alphabet, draw.integers(1, 24)).tolist()) for _ in range(draw.integers(1, 40))}
        rows = rows_of(*map(list, given))
        written = [rows.ids[start:stop].tolist() for start, stop in zip(rows.starts, rows.starts[1:])]
        pieces = forked(rows)
        text = [
            written[row][start:stop] for row, start, stop in zip(pieces.row, pieces.start, pieces.stop, strict=True)
        ]
        ends = np.flatnonzero(pieces.ends)
        assert sorted(pieces.row[ends]) == list(range(len(rows)))  # every row ends once
        for piece in range(len(text)):
            assert text[piece]  # nothing is run on no token
            above = int(pieces.above[piece])
            assert pieces.level[piece] == (0 if above < 0 else pieces.level[above] + 1)
            assert above < 0 or (pieces.kept[above] and pieces.stop[above] == pieces.start[piece])
        assert set(np.flatnonzero(pieces.kept)) == set(pieces.above.tolist()) - {-1}
        for piece in ends:
            read, at = list(text[piece]), int(pieces.above[piece])
            while at >= 0:
                read, at = [*text[at], *read], int(pieces.above[at])
            assert read == written[pieces.row[piece]]
        assert pieces.tokens <= whole_rows(rows).tokens
        if apart == 1:  # every beginning once: as many tokens as the tree has edges
            assert pieces.tokens == len({row[:stop] for row in given for stop in range(1, len(row) + 1)})


SCRIPTS = ["good film", "\n\n bad\nnever said", " \n \nso", "", "no\n", "and on and on"]
END = 200


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Each step's number of rows; the model says the next letter of the script whose number, and how far it has come,
    are its state."""
    rows: list[int] = []

    def run_batch(model, ids, mask):
        """Whole rows: their first token is the script's number."""
        assert mask.shape == ids.shape
        rows.append(len(ids))
        return Run(logits_of(torch.from_numpy(ids[:, 0]), torch.from_numpy(mask.sum(1) - 1)), ())

    def run_token(model, ids, states):
        script, at = states[0].ssm[0][:, 0], states[0].ssm[0][:, 1] + 1
        for which, place, token in zip(script.tolist(), at.tolist(), ids.tolist()):
            assert next_byte(which, place - 1) == token  # every row goes on from what it has said itself
        rows.append(len(ids))
        return logits_of(script, at), (LayerState(None, (torch.stack([script, at], 1),)),)

    monkeypatch.setattr(running, "run_batch", run_batch)
    monkeypatch.setattr(token_runs.TokenRuns, "_enter", lambda runs, edits: None)
    monkeypatch.setattr(token_runs.TokenRuns, "_run", run_token)
    return rows


def next_byte(script: int, at: int) -> int:
    said = SCRIPTS[script].encode()
    return said[at] if at < len(said) else END


def logits_of(script: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    logits = torch.zeros(len(script), 256)
    for row, (which, place) in enumerate(zip(script.tolist(), at.tolist())):
        logits[row, next_byte(which, place)] = 1
    return logits


@pytest.mark.parametrize("from_states", [True, False])
@pytest.mark.parametrize("new_tokens", [1, 4, 30])
def test_answers_end_where_they_should(steps, from_states, new_tokens):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(END)})
    assert tokenizer.eos_token_id == END
    module, config, device = SimpleNamespace(), SimpleNamespace(), torch.device("cpu")
    model = SimpleNamespace(num_layers=1, tokenizer=tokenizer, module=module, config=config, device=device)
    speaker = Answers(model, new_tokens)
    chosen = np.array([5, 0, 3, 1, 2, 4])
    rows = Rows.of(as_bytes([[number] for number in range(6)]))
    start = torch.zeros(6, dtype=torch.long)
    states = (LayerState(None, (torch.stack([torch.from_numpy(chosen), start], 1),)),) if from_states else ()
    found = speaker.after(rows, chosen, logits_of(torch.from_numpy(chosen), start), states)
    expected = {
        1: ["a", "g", "", "", "", "n"],
        4: ["and ", "good", "", "b", "", "no"],
        30: ["and on and on", "good film", "", "bad", "so", "no"],
    }
    assert found == expected[new_tokens]
    lengths = [min(length, new_tokens) for length in (10, 7, 7, 1, 3, 14)]  # "…film" and the end; "…bad", line break; …
    assert steps == [sum(length > step for length in lengths) for step in range(1, max(lengths))]


@pytest.mark.parametrize("name", ["mamba", "gated-deltanet", "bamba"])
@pytest.mark.parametrize("lengths", [(9, 40, 12), (40, 9, 12), (9, 9, 9)])
def test_a_rows_states_are_as_large_as_those_of_the_longest(name, lengths):
    model = Model(loud(random_example(name)), name=name)
    ids = np.random.default_rng(0).integers(1, 60, sum(lengths))
    rows = Rows(ids, np.cumsum([0, *lengths]))
    continues, found = running.try_resuming(model, rows)
    longest = model.run(model.encode(ids=ids[: max(lengths)].tolist())).states
    assert continues and found == size(longest)
    shorter = model.run(model.encode(ids=ids[:5].tolist())).states
    assert (size(shorter) < found) == (name == "bamba")  # whose attention keeps every key


@pytest.mark.parametrize(("share", "same"), [(0.5e-3, True), (2e-3, False)])
def test_one_logit_of_one_row_that_is_off_is_no_continuation(share, same, monkeypatch):
    model = Model(loud(random_example("mamba")))
    rows = Rows(np.arange(1, 37), np.array([0, 12, 24, 36]))
    own = running.run_batch

    def off(model, ids, mask, states=None, **options):
        found = own(model, ids, mask, states, **options)
        if states is not None:
            logits = found.logits[1].double()
            found.logits[1, 7] += share * (logits - logits.mean()).abs().max()
        return found

    monkeypatch.setattr(running, "run_batch", off)
    assert running.try_resuming(model, rows)[0] is same


def test_what_runs_together(monkeypatch):
    model = Model(random_example("mamba"))
    monkeypatch.setattr(running, "MAX_CACHED_NUMBERS", 1000 * LAYER_NUMBERS_PER_WIDTH * model.width)
    assert running.max_batch_tokens(model) == 1000
    weights = sum(weight.numel() for mixer in model.mixers for weight in mixer.parameters())
    monkeypatch.setattr(running, "BATCH_COST", {"cpu": (3, 10 * weights)})
    assert running.max_batch_padding(model) == 3 + 10 * len(model.mixers)
    monkeypatch.setattr(running, "MAX_STATE_BYTES", 1000)
    assert [running.max_held_states(model, each) for each in (0, 1, 300, 2000)] == [1000, 1000, 3, 1]


RECURRENT = [name for name in LANGUAGE if name not in HYBRIDS or name in ("bamba", "falcon_h1", "jamba")]
CASES = [("float64", name) for name in RECURRENT] + [("float32", name) for name in few(RECURRENT, "mamba", "mamba2")]


@pytest.mark.parametrize("precision, name", CASES)
def test_forked_is_unforked_is_one_by_one(precision, name, tokens_run):
    dtype, words, tolerance = {"float64": (torch.float64, PHRASES, 1e-9), "float32": (torch.float32, WORDS, 2e-5)}[
        precision
    ]
    model = language_model(name, dtype)
    with TrueFloat64() if dtype == torch.float64 else nullcontext():
        forked, plain = (Evaluator(model, words=words, fork=fork, tokens_at_once=500) for fork in (True, False))
        found = forked.scores(TEXTS)
        some = sum(tokens_run)
        expected = plain.scores(TEXTS)
        assert forked.forks and not plain.forks
        assert some < 0.9 * (sum(tokens_run) - some)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        chosen = [4]
        rows = token_rows(model, [TEXTS[at] for at in chosen])
        slow = slow_likelihoods(lambda row: model.logits(model.encode(ids=row))[0], rows, labels_of(model, words))
    np.testing.assert_allclose(found[chosen], slow, rtol=tolerance, atol=tolerance)
