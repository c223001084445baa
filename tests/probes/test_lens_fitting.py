"""The loop of a fit with its steps written down, several steps against a plain loop, and the rows that it reads."""

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refuses
from transformers import Mamba2Config, Mamba2ForCausalLM

pytest.importorskip("tuned_lens")

from ssmscope.core.model import Model  # noqa: E402
from ssmscope.data.tokens import IGNORED, TokenData  # noqa: E402
from ssmscope.errors import InputError  # noqa: E402
from ssmscope.probes.lens import training  # noqa: E402
from ssmscope.probes.lens.data import Rows, shuffled_batches, split_rows  # noqa: E402
from ssmscope.probes.lens.data import rows_of as rows_read  # noqa: E402
from ssmscope.probes.lens.lenses import chosen_states, untrained_lens  # noqa: E402
from ssmscope.probes.lens.training import LensFitting, Sums, compare_lenses, split_held_out  # noqa: E402

SILENT = SimpleNamespace(print=lambda *_: None)
LENGTHS = [7, 3, 5, 6, 4]


def rows_of(lengths: list[int], seed: int = 0) -> Rows:
    random = np.random.default_rng(seed)
    return Rows("r", "all", tuple(tuple(random.integers(0, 20, length).tolist()) for length in lengths))


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    sizes = dict(vocab_size=20, hidden_size=8, num_hidden_layers=3, state_size=4, num_heads=2, head_dim=8)
    config = Mamba2Config(**sizes, expand=2, n_groups=1, chunk_size=8, use_cache=False)
    return Model(Mamba2ForCausalLM(config).eval(), name="tiny")


class Written(LensFitting):
    """A fit whose steps take 30 seconds each, and whose evaluations have the losses that are given, in order."""

    def __init__(self, monkeypatch, path, held_out: list[float], **options) -> None:
        self.events: list[tuple] = []
        self.clock, self.losses = 1000.0, iter(held_out)
        given = dict(steps=7, look_every=3, patience=None, checkpoint_minutes=100, batch_tokens=9, seed=5)
        self.options, self.checkpoint, self.console = {**given, **options}, path / "state.pt", SILENT
        self.train, self.weight, self.bias = rows_of(LENGTHS), torch.zeros(1), torch.zeros(1)
        self.step = self.epoch = self.place = 0
        self.best, self.history = None, []
        monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: self.clock))
        monkeypatch.setattr(training.stored, "save_state", lambda path, state: self.events.append(("save", state)))

    def _train_step(self, chosen) -> None:
        self.clock += 30
        self.events.append(("train", self.step, chosen))

    def _announce(self) -> None:
        pass

    def _evaluate(self) -> None:
        found = next(self.losses)
        self.events.append(("evaluate", self.step))
        self.history.append({"step": self.step, "held_out": found})
        if self.best is None or found < self.best["held_out"]:
            self.best = {"step": self.step, "held_out": found, "weight": torch.ones(1), "bias": torch.ones(1)}

    def _state(self):
        return self.step

    def steps(self, kind: str) -> list[int]:
        return [event[1] for event in self.events if event[0] == kind]


LEFT: list[int] = []
BAR = SimpleNamespace(
    add_task=lambda *_, **__: LEFT.append(0), advance=lambda *_: None, remove_task=lambda _: LEFT.pop()
)


class TestLoop:
    def test_evaluates_and_saves_at_its_times_and_reads_the_rows_again(self, monkeypatch, tmp_path):
        fitting = Written(monkeypatch, tmp_path, [4, 3, 2, 1])
        fitting.run(BAR)
        assert fitting.steps("evaluate") == [0, 3, 6, 7] and fitting.steps("save") == [3, 6]
        orders = [shuffled_batches(LENGTHS, 9, 5, epoch) for epoch in range(3)]
        expected = [batch for order in orders for batch in order][:7]
        assert len(orders[0]) < 7 and orders[0] != orders[1]
        assert [event[1:] for event in fitting.events if event[0] == "train"] == list(enumerate(expected))
        assert fitting.events[:2] == [("evaluate", 0), ("train", 0, expected[0])]
        assert fitting.events[4:6] == [("evaluate", 3), ("save", 3)]
        assert (fitting.epoch, fitting.place) == (1, 7 - len(orders[0]))

    def test_saves_after_its_minutes_too(self, monkeypatch, tmp_path):
        fitting = Written(monkeypatch, tmp_path, [4, 3, 2, 1], checkpoint_minutes=1, look_every=5)
        fitting.run(BAR)
        assert fitting.steps("save") == [2, 4, 5, 7]
        often = Written(monkeypatch, tmp_path, [4, 3, 2, 1], checkpoint_minutes=0.5, look_every=100)
        often.run(BAR)
        assert often.steps("save") == [1, 2, 3, 4, 5, 6, 7] and often.steps("evaluate") == [0, 7]
        seldom = Written(monkeypatch, tmp_path, [4, 3, 2, 1], checkpoint_minutes=1.01, look_every=100)
        seldom.run(BAR)
        assert seldom.steps("save") == [3, 6] and not LEFT

    @pytest.mark.parametrize(
        ("losses", "last"), [([4, 5, 6, 7, 8], 2), ([4, 3, 5, 6, 7], 3), ([4, 5, 3, 2, 6, 7], 5), ([4, 4, 4], 2)]
    )
    def test_stops_when_evaluations_get_no_better(self, monkeypatch, tmp_path, losses, last):
        fitting = Written(monkeypatch, tmp_path, losses, steps=30, look_every=1, patience=2)
        weight, bias = fitting.run(BAR)
        assert fitting.steps("evaluate") == list(range(last + 1)) and weight.item() == bias.item() == 1

    def test_goes_on_after_a_checkpoint(self, monkeypatch, tmp_path):
        fitting = Written(monkeypatch, tmp_path, [1.0, 0.5])
        fitting.checkpoint.touch()
        order = shuffled_batches(LENGTHS, 9, 5, 1)
        best = {"step": 0, "held_out": 3.0, "weight": torch.ones(1), "bias": torch.zeros(1)}
        state = dict(weight=torch.ones(1), bias=torch.ones(1), optimizer={}, step=5, epoch=1, place=len(order) - 1)
        state |= dict(loss_sum=torch.zeros(()), best=best, history=[{"step": 0}, {"step": 3}])
        monkeypatch.setattr(training.stored, "load_state", lambda path: state)
        fitting.optimizer = SimpleNamespace(load_state_dict=lambda state: None)
        fitting.run(BAR)
        assert [event[1:] for event in fitting.events if event[0] == "train"] == [
            (5, order[-1]),
            (6, shuffled_batches(LENGTHS, 9, 5, 2)[0]),
        ]
        assert fitting.steps("evaluate") == [6, 7] and (fitting.epoch, fitting.place) == (2, 1)


def test_evaluations_since_the_best(monkeypatch, tmp_path):
    fitting = Written(monkeypatch, tmp_path, [])
    fitting.history = [{"step": step} for step in (0, 3, 6, 9)]
    for best, expected in ((None, 0), (0, 3), (3, 2), (9, 0)):
        fitting.best = None if best is None else {"step": best}
        assert fitting._evaluations_since_best() == expected


def plain_fit(model: Model, rows: Rows, options: dict, batches: list[list[int]]) -> tuple[list, list[float]]:
    """The weights and biases after these steps, and the loss of each, by autograd and torch's own optimizers."""
    unembed = untrained_lens(model).unembed
    weight, bias = torch.zeros(3, 8, 8, requires_grad=True), torch.zeros(3, 8, requires_grad=True)
    rate, decay = options["learning_rate"], options["weight_decay"]
    if options["optimizer"] == "adam":
        own = torch.optim.Adam([weight, bias], lr=rate, betas=(0.9, 0.999), amsgrad=True, weight_decay=decay)
    else:
        own = torch.optim.SGD([weight, bias], lr=rate, momentum=0.9, nesterov=True, weight_decay=decay)
        rate = rate * 0.1
    losses = []
    for step, chosen in enumerate(batches):
        own.param_groups[0]["lr"] = rate * (1 - step / options["steps"])
        states = torch.cat(
            [chosen_states(model, rows.batch(model, [row]), options["positions"]) for row in sorted(chosen)], dim=1
        )
        moved = torch.stack([h + h @ W.T + b for h, W, b in zip(states, weight, bias)])
        p, q = unembed(states[-1]).log_softmax(-1), unembed(moved).log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).mean(1)
        own.zero_grad()
        kl.sum().backward()
        torch.nn.utils.clip_grad_norm_([weight, bias], options["clip"])
        own.step()
        losses.append(kl.mean().item())
    return [weight.detach(), bias.detach()], losses


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("positions", ["every", "last"])
def test_steps_are_those_of_a_plain_loop(model, tmp_path, monkeypatch, optimizer, positions):
    """Rows of different lengths in batches of several runs, the weights decaying and the gradients clipped."""
    rows, choosing = rows_of(LENGTHS), rows_of([4, 6, 3], seed=1)
    options = dict(optimizer=optimizer, learning_rate=0.3, weight_decay=0.1, clip=0.05, steps=5, look_every=2, seed=3)
    options |= dict(positions=positions, batch_tokens=14, patience=None, checkpoint_minutes=100)
    monkeypatch.setattr(training, "tokens_at_once", lambda model, layers: 11)
    fitting = LensFitting(model, untrained_lens(model), (rows, choosing), options, tmp_path / "state.pt", SILENT)
    monkeypatch.setattr(training.stored, "save_state", lambda *_: None)
    fitting.run(BAR)
    batches = [batch for epoch in range(3) for batch in shuffled_batches(LENGTHS, 14, 3, epoch)][:5]
    assert max(map(len, batches)) > 2
    expected, losses = plain_fit(model, rows, options, batches)
    for found, wanted in zip((fitting.weight, fitting.bias), expected):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-3, atol=1e-5)
    assert [each["step"] for each in fitting.history] == [0, 2, 4, 5]
    means = [np.mean(losses[:2]), np.mean(losses[2:4]), losses[4]]
    assert [each["training"] for each in fitting.history] == pytest.approx([np.nan, *means], rel=1e-3, nan_ok=True)
    best = min(fitting.history, key=lambda each: each["held_out"])
    assert {name: fitting.best[name] for name in ("step", "held_out")} == {n: best[n] for n in ("step", "held_out")}
    sums = training.measure(model, fitting.unembed, choosing, positions, [(fitting.weight, fitting.bias)])[0]
    assert fitting.history[-1]["held_out"] == pytest.approx(float(sums.kl.sum() / sums.asked.sum() / 3), rel=1e-6)


def test_a_checkpoint_holds_all_that_a_fit_needs(model, tmp_path):
    rows = rows_of(LENGTHS)
    options = dict(optimizer="sgd", learning_rate=0.3, weight_decay=0.1, clip=0.5, steps=9, look_every=2, seed=3)
    options |= dict(positions="every", batch_tokens=14, patience=None, checkpoint_minutes=100)
    made = [
        LensFitting(model, untrained_lens(model), (rows, rows), options, tmp_path / "state.pt", SILENT)
        for _ in range(2)
    ]
    one, other = made
    one._evaluate()
    for _ in range(3):
        one._train_step([0, 2, 3])
        one.step += 1
    one.epoch, one.place = 4, 2
    other._restore(copy.deepcopy(one._state()))  # as from a file
    for fitting in made:
        fitting._train_step([1, 4])
    assert torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias) and one.bias.any()
    assert (other.step, other.epoch, other.place, other.history) == (3, 4, 2, one.history)
    assert float(other.loss_sum) == float(one.loss_sum) > 0
    assert other.best["held_out"] == one.best["held_out"] and torch.equal(other.best["weight"], one.best["weight"])


def test_the_first_of_equally_good_weights_is_kept(model, tmp_path):
    rows = rows_of(LENGTHS)
    options = dict(optimizer="sgd", learning_rate=0.3, weight_decay=0.1, clip=0.5, steps=9, positions="every")
    fitting = LensFitting(model, untrained_lens(model), (rows, rows), options, tmp_path / "state.pt", SILENT)
    for step in (0, 4):
        fitting.step = step
        fitting._evaluate()
    assert fitting.best["step"] == 0 and [each["step"] for each in fitting.history] == [0, 4]


@pytest.mark.parametrize(("scale", "says"), [(1e30, "in step 3; lower learning_rate"), (None, "KL divergence is nan")])
def test_a_divergence_that_is_not_finite(model, tmp_path, scale, says):
    rows = rows_of(LENGTHS)
    options = dict(optimizer="sgd", learning_rate=0.3, weight_decay=0.1, clip=0.5, steps=9, positions="every")
    fitting = LensFitting(model, untrained_lens(model), (rows, rows), options, tmp_path / "state.pt", SILENT)
    fitting.step = 2
    fitting.weight.data.fill_(torch.nan)
    refuses(says, lambda: fitting._train_step([0]) if scale else fitting._evaluate())


def test_logits_of_all_streams_are_few_at_a_time(monkeypatch):
    asked = []
    monkeypatch.setattr(training, "slices", lambda *given: asked.append(given) or iter([slice(0, 2), slice(2, 5)]))
    training.divergences(torch.randn(4, 5, 6), torch.nn.Linear(6, 9))
    assert asked == [(5, 4 * 9, torch.device("cpu"))]


def test_lenses_are_compared_on_the_same_rows():
    """Every mean is over positions, so that long rows count for more."""
    random = np.random.default_rng(0)
    asked = random.integers(1, 9, 40)
    logit = random.random((40, 3)) * asked[:, None]
    tuned = Sums(logit * [0.5, 0.7, 0.9], asked)
    found = compare_lenses(tuned, Sums(logit, asked), seed=1)
    assert (found["measured"], found["rows"]) == (asked.sum(), 40)
    own, other = tuned.kl.sum(0) / asked.sum(), logit.sum(0) / asked.sum()
    for layer, one in enumerate(found["layers"]):
        assert one.layer == layer
        values = (one.tuned.value, one.logit.value, one.gained.value)
        assert values == pytest.approx((own[layer], other[layer], other[layer] - own[layer]))
        gain = 1 / [0.5, 0.7, 0.9][layer]
        assert (one.logit.low, one.logit.high) == pytest.approx((one.tuned.low * gain, one.tuned.high * gain))
        assert (one.gained.low, one.gained.high) == pytest.approx(
            (one.tuned.low * (gain - 1), one.tuned.high * (gain - 1))
        )
    assert (found["tuned"].value, found["logit"].value) == pytest.approx((own.mean(), other.mean()))


def test_the_record_is_the_last_of_a_lens_files(tmp_path, monkeypatch):
    """Without it the files of tuned-lens are not yet a lens of ours."""
    (tmp_path / "checkpoint").mkdir()
    moved, replace = [], training.os.replace
    monkeypatch.setattr(training.os, "replace", lambda file, to: moved.append(to) or replace(file, to))
    names = ["params.pt", "config.json", "zeros.pt"]
    tuned = SimpleNamespace(save=lambda folder: [(Path(folder) / name).write_text(name) for name in names])
    training._save(tmp_path, tuned, SimpleNamespace(to_json=lambda: "{}"))
    moved = [to for to in moved if to.parent == tmp_path]
    assert moved[-1] == tmp_path / "lens.json" and sorted(moved[:-1]) == sorted(tmp_path / name for name in names)
    assert not list((tmp_path / "checkpoint").iterdir())


def test_an_unfinished_fit_is_continued_by_its_own_plan_alone(tmp_path):
    plan = {"fingerprint": "a", "options": {"steps": 5, "clip": 1.0}, "seed": 0, "data": {"train": [1]}}
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "plan.json").write_text(json.dumps(plan))
    assert training._is_finished(tmp_path, plan) is False
    for changed, says in (
        ({"options": {"steps": 5, "clip": 2.0}, "seed": 1}, "clip was 1.0 and is now 2.0"),
        ({"seed": 1, "data": {}}, "another seed"),
        ({"data": {"train": [2]}}, "another data"),
        ({"fingerprint": "b", "options": {}}, "another model"),
    ):
        with pytest.raises(InputError, match=rf"holds another fit \({says}\); give a new directory"):
            training._is_finished(tmp_path, {**plan, **changed})
    assert training._is_finished(tmp_path / "new", plan) is False


def test_rows_that_cannot_be_read(model):
    ids, targets = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[2, 3, 5], [IGNORED] * 3])
    assert rows_read(model, TokenData("d", "all", ids, targets, ("a",))).ids == ((1, 2, 3), (4, 5, 6))
    targets[1, 1] = 6
    assert rows_read(model, TokenData("d", "all", ids, targets, ("a",))).ids == ((1, 2, 3), (4, 5))
    with pytest.raises(InputError, match=r"d \(all\) is empty; give at least 4"):
        rows_read(model, TokenData("d", "all", ids[:0], targets[:0], ("a",)))
    assert rows_read(model, [[19]]).ids == ((19,),)
    for data, says in (
        ([[1], [20]], "has token id 20, outside the model's 0…19"),
        ([[], [1]], "text 0 is .*, no text"),
    ):
        refuses(says, rows_read, model, data)


def numbered(count: int, length: int = 2) -> Rows:
    return Rows("r", "all", tuple((row,) * length for row in range(count)))


def test_held_out_rows_choose_and_measure_by_turns(monkeypatch):
    monkeypatch.setattr(training, "MAX_CHOOSING_TOKENS", 12)
    for count, length, chosen in (
        (2, 2, [0]), (9, 2, [0, 2, 4, 6, 8]), (9, 4, [0, 2, 4]), (9, 5, [0, 2]), (5, 99, [0]),
    ):  # fmt: skip
        choosing, measured = split_held_out(numbered(count, length))
        assert [row[0] for row in choosing.ids] == chosen
        assert [row[0] for row in measured.ids] == sorted(set(range(count)) - set(chosen))


def test_rows_are_held_out_by_a_share_of_at_least_two():
    for count, share, held in ((20, 0.25, 5), (20, 0.01, 2), (3, 0.5, 2), (10, 0.34, 3), (10, 0.36, 4)):
        train, rest = split_rows(numbered(count), share, seed=1)
        assert (len(rest), len(train)) == (held, count - held)
        for part in (train, rest):
            assert list(part.ids) == sorted(part.ids)
    refuses("has 10 rows; a lens needs at least 3", split_rows, numbered(10), 0.99, seed=1)


def test_batches_are_filled():
    assert [len(batch) for batch in shuffled_batches([50] * 7, 100, 0, 0)] == [2, 2, 2, 1]
    assert [len(batch) for batch in shuffled_batches([50] * 7, 99, 0, 0)] == [1] * 7
    assert shuffled_batches([3] * 9, 1000, 0, 2)[0] != sorted(shuffled_batches([3] * 9, 1000, 0, 2)[0])


def test_a_fingerprint_is_of_every_row_and_number():
    every = [
        Rows("r", "all", ((1, 2), (3,))), Rows("r", "all", ((1,), (2, 3))), Rows("r", "all", ((1, 2), (4,))),
        Rows("r", "all", ((1, 2),)), Rows("r", "all", pixels=np.arange(24, dtype=np.uint8).reshape(2, 4, 3)),
        Rows("r", "all", pixels=np.arange(24, dtype=np.uint8).reshape(4, 2, 3)),
        Rows("r", "all", pixels=np.arange(24, dtype=np.uint8)[::-1].reshape(2, 4, 3)),
    ]  # fmt: skip
    found = {rows.fingerprint for rows in every}
    assert len(found) == len(every) and {len(each) for each in found} == {16}
    assert dataclasses.replace(every[0], name="other").fingerprint == every[0].fingerprint
    assert every[0].described() | {"fingerprint": ""} == dict(name="r", split="all", fingerprint="", rows=2, tokens=3)
    assert every[4].described()["tokens"] == 2 * 5 and every[4].take([1]).pixels.tolist() == [
        every[4].pixels[1].tolist()
    ]
