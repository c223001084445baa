"""Plans of runs: what runs together and at what cost, where chunks begin, which rows are tried, and what a cached score
depends on: each against a slow count or numbers made by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluation.slow import FILLING, LABELS, PHRASES, WORDS, language_model
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM
from ssmscope.core.model import Model, Run
from ssmscope.core.trace import LayerState
from ssmscope.evaluation import Evaluator, evaluator, running
from ssmscope.evaluation.forking import Pieces, Rows, as_bytes, token_rows, ways_to_fork, whole_rows
from ssmscope.evaluation.running import batch_groups, max_batch_rows, max_held_states, plan_cost, plan_pieces
from ssmscope.zoo.documents import byte_tokenizer


def rows_of(*rows: list[int]) -> Rows:
    return Rows.of(sorted(as_bytes(rows)))


# (start, stop, above, level, kept); a piece that is not kept ends a row
PIECES = [
    (0, 9, -1, 0, True), (0, 4, -1, 0, True), (9, 12, 0, 1, True), (0, 7, -1, 0, False), (0, 2, -1, 0, False),
    (4, 9, 1, 1, False), (12, 13, 2, 2, False), (12, 14, 2, 2, False), (9, 12, 0, 1, False),
]  # fmt: skip


def pieces() -> Pieces:
    start, stop, above, level, kept = np.array(PIECES, dtype=np.int64).T
    return Pieces(np.arange(len(start)), start, stop, above, level, kept.astype(bool), ~kept.astype(bool))


class TestCosts:
    def test_groups_are_levels_beginnings_and_the_rest_by_length(self):
        assert [group.tolist() for group in batch_groups(pieces())] == [[1, 0], [2], [4, 3], [6, 7, 8, 5]]
        alone = whole_rows(rows_of([1, 2, 3], [4], [5, 6]))
        assert [group.tolist() for group in batch_groups(alone)] == [[1, 2, 0], []]
        assert pieces().tokens == 9 + 4 + 3 + 7 + 2 + 5 + 1 + 2 + 3

    @pytest.mark.parametrize(("options", "batches"), [
        (dict(tokens_at_once=100, held=100, batch=50), [2 * 9, 3, 2 * 7, 4 * 5]),
        (dict(tokens_at_once=100, held=1, batch=50), [4, 9, 3, 2 * 7, 1, 2, 3, 5]),
        (dict(tokens_at_once=100, held=2, batch=50), [2 * 9, 3, 2 * 7, 2 * 2, 2 * 5]),
        (dict(tokens_at_once=10, held=100, batch=50), [4, 9, 3, 2, 7, 3 * 3, 5]),
        (dict(tokens_at_once=100, held=100, batch=4), [4, 9, 3, 2, 7, 3 * 3, 5]),  # whose padding is 4 at most
        (dict(tokens_at_once=100, held=100, batch=5), [2 * 9, 3, 2 * 7, 3 * 3, 5]),
    ])  # fmt: skip
    def test_are_tokens_with_padding_batches_and_resumed_rows(self, options, batches):
        assert plan_cost(pieces(), **options) == 5 * 2 + sum(batches) + options["batch"] * len(batches)

    def test_the_cheapest_plan_is_taken(self, monkeypatch):
        draw = np.random.default_rng(0)
        model = SimpleNamespace(labels=("no", "yes"))
        chosen = set()
        for _ in range(40):
            ends = draw.integers(0, 9, (int(draw.integers(2, 30)), 3)).tolist()
            rows = rows_of(*map(list, {(*range(int(draw.integers(2, 30))), *end) for end in map(tuple, ends)}))
            batch, held, tokens = (int(draw.integers(1, most)) for most in (60, 9, 200))
            monkeypatch.setattr(running, "max_batch_padding", lambda model, batch=batch: batch)
            plans = [*ways_to_fork(rows), whole_rows(rows)]
            costs = [plan_cost(plan, tokens_at_once=tokens, held=held, batch=batch) for plan in plans]
            found = plan_pieces(model, rows, tokens, held)
            assert found.row.tolist() == plans[costs.index(min(costs))].row.tolist()
            chosen.add(costs.index(min(costs)))
        assert len(chosen) > 2

    @pytest.mark.parametrize(("rows", "factor", "tokens"), [
        ([[1, 2, 3, 4, end] for end in (5, 6)], 0.5, 4 + 2),
        ([[1, 2, 3, end] for end in (5, 6)], 0.5, 2 * 4),
        ([[*range(16), end] for end in (5, 6)], 2, 16 + 2),
        ([[*range(15), end] for end in (5, 6)], 2, 2 * 16),
        ([[1, 2, 3, 4, 5, end] for end in range(173)], 2, 5 + 173),  # 172 · 5 − 173 · 2 = 514
        ([[1, 2, 3, 4, 5, end] for end in range(172)], 2, 6 * 172),
        ([[1, 2, 3, end] for end in range(131)], 0.5, 3 + 131),  # 130 · 3 − 131 · 2 = 128
        ([[1, 2, 3, end] for end in range(130)], 0.5, 4 * 130),
    ])  # fmt: skip
    def test_thresholds_have_a_factor(self, rows, factor, tokens):
        (plan,) = ways_to_fork(rows_of(*rows), (factor,))
        assert plan.tokens == tokens

    def test_pieces_come_by_level_and_row(self):
        draw = np.random.default_rng(1)
        rows = rows_of(*map(list, {tuple(draw.integers(0, 2, draw.integers(1, 30)).tolist()) for _ in range(60)}))
        plans = list(ways_to_fork(rows))
        assert len(plans) == 6 and plans[0].tokens < plans[-1].tokens <= whole_rows(rows).tokens
        for plan in plans:
            assert list(zip(plan.level, plan.row)) == sorted(zip(plan.level, plan.row)) and plan.level.max() < 20

    def test_rows_of_a_batch_by_their_logits_and_states(self, monkeypatch):
        monkeypatch.setattr(running, "MAX_BATCH_LOGITS", 300)
        language, classes = (SimpleNamespace(labels=labels, vocabulary=50) for labels in (None, ("a", "b", "c")))
        assert [max_batch_rows(language, states) for states in (None, 4, 9)] == [6, 4, 6]
        assert max_batch_rows(classes) == 100 and max_batch_rows(classes, 1000) == 100
        assert max_batch_rows(SimpleNamespace(labels=None, vocabulary=1000)) == 1

    def test_a_gpu_holds_states_of_a_sixteenth_of_its_memory(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16_016))
        gpu = SimpleNamespace(device=torch.device("cuda"))
        assert [max_held_states(gpu, size) for size in (1, 100, 2000)] == [1001, 10, 1]
        monkeypatch.setattr(running, "BATCH_COST", {"cpu": (3, 10), "cuda": (7, 1000)})
        mixers = [SimpleNamespace(parameters=lambda: [torch.zeros(3, 5), torch.zeros(10)])] * 2
        gpu.mixers, gpu.width = mixers, 2**19 // 600
        assert running.max_batch_padding(gpu) == 7 + 1000 * 2 // 50 and running.max_batch_tokens(gpu) == 2**29 // (
            16 * gpu.width
        )
        gpu.mixers = [SimpleNamespace(parameters=lambda: [])]
        assert running.max_batch_padding(gpu) == 1007


class TestChunks:
    @pytest.mark.parametrize("words", [WORDS, PHRASES, None], ids=["one token", "several tokens", "classes"])
    @pytest.mark.parametrize("forking", [True, False])
    def test_are_as_long_as_tokens_and_states_allow(self, monkeypatch, words, forking):
        """Against counts over each chunk's rows: tokens that are not shared with the row before, states where rows part
        and within label words."""
        monkeypatch.setattr(evaluator, "BATCHES_PER_CHUNK", 2)
        model = language_model("selective-ssm-classes" if words is None else "mamba2")
        asked = Evaluator(model, words=words, fork=forking)
        asked._tree_indices(["w1"])
        asked._tried = True
        own = 5 if words is PHRASES else 0  # States within label words.
        assert [len(tree.prefixes) - 1 for tree in asked._trees] == [own] * (words is not None)
        draw, sizes = np.random.default_rng(2), set()
        for _ in range(60):
            given = {tuple(draw.integers(0, 2, draw.integers(1, 12)).tolist()) for _ in range(40)}
            rows = [(row, 0) for row in sorted(as_bytes([list(row) for row in given]))]
            asked._tokens_at_once, asked._states_at_once = int(draw.integers(3, 30)), int(draw.integers(1, 40))
            chunks: list[list[tuple[bytes, int]]] = []
            for row in rows:
                longer = [*chunks[-1], row] if chunks else [row]
                shared = [common(a, b) if forking else 0 for (a, _), (b, _) in zip(longer, longer[1:])]
                tokens = sum(len(each) // 4 for each, _ in longer) - sum(shared)
                parted = {each[: 4 * length] for (each, _), length in zip(longer[1:], shared) if length}
                fits = tokens <= 2 * asked._tokens_at_once
                if chunks and fits and len(parted) + own * len(longer) <= asked._states_at_once:
                    chunks[-1] = longer
                else:
                    chunks.append([row])
            assert list(asked._chunks(rows)) == chunks
            sizes |= set(map(len, chunks))
        assert len(sizes) > 5


def common(one: bytes, other: bytes) -> int:
    """The tokens of four bytes each with which both begin."""
    length = 0
    while one[4 * length : 4 * length + 4] == other[4 * length : 4 * length + 4] != b"":
        length += 1
    return length


class TestWhenForkingIsTried:
    @pytest.mark.parametrize(("options", "texts", "tried"), [
        (dict(words=WORDS), ["w3", "w1 w2"], False),
        (dict(words=WORDS), [" ".join(FILLING[:9] + (end,)) for end in ("w1", "w2")], True),
        (dict(words=PHRASES), ["w3", "w5 w2", "w1 w2"], True),
        (dict(words=WORDS, scoring="generated"), ["w1 w2", "w3"], True),
        (dict(words=PHRASES, fork=False), ["w1 w2", "w3"], False),
    ])  # fmt: skip
    def test_where_it_would_save_something(self, monkeypatch, options, texts, tried):
        asked = []

        def try_resuming(model, rows):
            asked.append(len(rows))
            assert (np.diff(rows.ids[rows.starts[:-1]]) >= 0).all()  # in the order of rows
            return False, 0

        monkeypatch.setattr(evaluator, "try_resuming", try_resuming)
        found = Evaluator(language_model("mamba2"), **options)
        for _ in range(2):
            found.scores(texts)
            found.scores([text + " w5" for text in texts])
        assert asked == [len(texts)] * tried  # once, on the rows of the first call
        assert found.forks == (options.get("fork", True) and not tried) and not found._forking

    @pytest.mark.parametrize("continues", [True, False])
    def test_states_are_limited_where_rows_continue_from_them(self, monkeypatch, continues):
        monkeypatch.setattr(evaluator, "try_resuming", lambda model, rows: (continues, 12))
        monkeypatch.setattr(evaluator, "max_held_states", lambda model, size: 5 * size)
        found = Evaluator(language_model("mamba2"), words=PHRASES)
        found.scores(["w1 w2"])
        assert found._states_at_once == (60 if continues else evaluator.NO_LIMIT)


@pytest.mark.parametrize(("name", "options", "kept"), [
    ("mamba2", dict(words=WORDS, scoring="generated", new_tokens=2), True),
    ("mamba2", dict(words=WORDS, scoring="generated", new_tokens=2, fork=False), False),
    ("mamba2", dict(words=PHRASES), False),
    ("selective-ssm-classes", {}, False),
])  # fmt: skip
def test_states_are_kept_for_continuations_alone(monkeypatch, name, options, kept):
    seen, own = [], evaluator.run_pieces
    monkeypatch.setattr(
        evaluator, "run_pieces", lambda *a, states, **k: seen.append(states) or own(*a, states=states, **k)
    )
    start = " ".join(FILLING[:12])
    Evaluator(language_model(name), **options).scores([f"{start} w40", f"{start} w41"])
    assert seen == [kept]


def test_label_words_are_looked_up_by_the_last_word_and_the_space_after_it():
    sizes = dict(vocab_size=256, hidden_size=8, num_hidden_layers=1, state_size=4, num_heads=2, head_dim=8, n_groups=1)
    model = Model(Mamba2ForCausalLM(Mamba2Config(**sizes)), byte_tokenizer(), "bytes")
    asked = Evaluator(model, words=["yes", "no"])
    assert asked._tree_indices(["one two", "of one \n", "a  two", " two ", "two"]) == [0, 1, 0, 1, 0]
    assert asked._tree_of_end == {"two": 0, "one \n": 1, "two ": 1} and len(asked._trees) == 2
    assert [tree.next_tokens[0] for tree in asked._trees] == [(32,), (ord("y"), ord("n"))]


def test_what_a_model_must_give(monkeypatch):
    model, asked = language_model("mamba2"), []
    monkeypatch.setattr(Model, "check_classes", lambda self, what: asked.append(what))
    Evaluator(model, words=WORDS)
    assert asked == ["an evaluation"]


@pytest.fixture
def tried(monkeypatch):
    """`tried(lengths, dtype, off)` are the answer, and the ids and mask of every batch, of a model whose logits in two
    parts are off by a share of the largest one's distance from their mean."""

    def run(lengths, dtype=torch.float32, off=0.0):
        batches = []

        def run_batch(model, ids, mask, states=None, *, keep=False):
            assert keep == (len(batches) == 1) and (states is not None) == (len(batches) == 2)
            batches.append([row[real].tolist() for row, real in zip(ids, mask)])
            logits = torch.tensor([[0.0, 3.0, 1.0, -6.0]]).double() + torch.arange(len(ids)).unsqueeze(1)
            if states is not None:
                logits[-1, 1] += off * 5.5
            return Run(logits, (LayerState(None, (torch.zeros(len(ids), 3, 5),)),))

        monkeypatch.setattr(running, "run_batch", run_batch)
        module = nn.Linear(1, 1).to(dtype)
        ids = np.arange(sum(lengths))
        rows = Rows(ids, np.cumsum([0, *lengths]))
        return running.try_resuming(SimpleNamespace(continues=True, module=module), rows), batches

    return run


def test_the_shortest_a_middle_and_the_longest_row_are_tried_once(tried):
    found, batches = tried([40, 3, 20, 9, 12])
    assert found == (True, 3 * 5 * 4)
    short, middle, long = list(range(40, 43)) * 3, list(range(72, 84)), list(range(32))
    assert sorted(batches[0]) == sorted([short[:8], middle, long])
    for whole, first, second in zip(*batches):
        assert whole == first + second and len(first) == len(whole) // 2
    assert len(tried([9])[1][0]) == 1 and len(tried([9, 9])[1][0]) == 2 and len(tried([9] * 50)[1][0]) == 3
    assert list(map(len, tried([7, 8, 33])[1][0])) == [8, 8, 32]


@pytest.mark.parametrize(("dtype", "off", "same"), [
    (torch.float32, 0.9e-3, True), (torch.float32, 1.1e-3, False), (torch.float32, -1.1e-3, False),
    (torch.bfloat16, 0.12, True), (torch.bfloat16, 0.13, False), (torch.float16, 0.015, True),
    (torch.float16, 0.017, False),
])  # fmt: skip
def test_how_far_a_run_in_two_parts_may_be_off(tried, dtype, off, same):
    assert tried([9, 12, 10], dtype, off)[0][0] is same


def test_a_model_that_does_not_continue_is_not_tried():
    assert running.try_resuming(SimpleNamespace(continues=False), None) == (False, 0)


def test_what_a_cached_score_depends_on(monkeypatch):
    model = language_model("mamba2")

    def key(text: str = "w1 w2", **options) -> bytes:
        found = Evaluator(model, **options)
        row = as_bytes(token_rows(model, [text]))[0], found._tree_indices([text])[0]
        return found._keys([row])[row]

    vocabulary = list(model.tokenizer.get_vocab().items())
    said = dict(words=["w1", "w2"], scoring="generated")
    every = [
        key(words=WORDS), key("w1 w3", words=WORDS), key(words=WORDS, normalise=True), key(words=PHRASES), key(**said),
    ]  # fmt: skip
    every += [key(**said, new_tokens=9), key(words=["w1", "w3"], scoring="generated")]
    again = [key(words=WORDS), key(**said)]
    monkeypatch.setattr(model.tokenizer, "get_vocab", lambda: dict(vocabulary[::-1]))
    assert again == [every[0], every[4]] and key(**said) == every[4]  # in any order
    monkeypatch.setattr(model.tokenizer, "get_vocab", lambda: dict(vocabulary[1:]))
    every += [key(**said)]
    monkeypatch.setattr(evaluator, "__version__", "another")
    every += [key(words=WORDS)]
    monkeypatch.setattr(type(model), "source", {**model.source, "edits": ["one"]})
    every += [key(words=WORDS)]
    assert len(set(every)) == len(every) and {len(each) for each in every} == {16}
    assert key(words=WORDS) != key(words=[*WORDS[:2], LABELS[3]])
