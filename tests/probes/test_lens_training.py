"""Fitting a tuned lens: the divergence and its gradient, the loop, a kill in its middle, and its gain."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused, refuses
from torch.nn.functional import cross_entropy
from transformers import Mamba2Config, Mamba2ForCausalLM

pytest.importorskip("tuned_lens")
from killed import killed
import ssmscope  # noqa: E402
import ssmscope.probes.lens.lenses as lenses  # noqa: E402
from ssmscope.core.mixers import fast_scan  # noqa: E402
from ssmscope.core.model import Model  # noqa: E402
from ssmscope.data.language import language_data  # noqa: E402
from ssmscope.data.pixels import PixelData  # noqa: E402
from ssmscope.data.tokens import (  # noqa: E402
    IGNORED,
    SequenceData,  # noqa: E402
    TokenData,
)
from ssmscope.errors import InputError  # noqa: E402
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification  # noqa: E402
from ssmscope.probes.lens import fit_lens, training  # noqa: E402
from ssmscope.probes.lens.data import Rows, rows_of, shuffled_batches, split_rows  # noqa: E402
from ssmscope.probes.lens.lenses import chosen_states, load_lens, logit_lens  # noqa: E402
from ssmscope.probes.lens.result import LensFit  # noqa: E402
from ssmscope.probes.lens.training import divergences, measure  # noqa: E402
from ssmscope.render.table import with_interval  # noqa
from ssmscope.zoo.documents import word_tokenizer  # noqa: E402

SCRIPT = """
import json, sys
import ssmscope
from ssmscope.probes.lens import fit_lens
fit_lens(ssmscope.load(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], **json.loads(sys.argv[4]))
"""
TOKENS = 20
QUICK = dict(steps=12, batch_tokens=200, look_every=4, held_out=0.3, progress=False)


def fit_into(out: Path, model: Model, data, **given) -> Path:
    """The directory, with a lens fitted into it."""
    fit_lens(model, data, out, **given)
    return out


def chain(rows: int, length: int, seed: int) -> list[list[int]]:
    """Rows in which a token's successor depends on it and, by its parity, on the one before."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(rows):
        row = random.integers(0, TOKENS, 2).tolist()
        while len(row) < length:
            sure = (3 * row[-1] + row[-2] % 2) % TOKENS
            row.append(sure if random.random() < 0.8 else int(random.integers(TOKENS)))
        found.append(row)
    return found


def backbone(**sizes) -> Mamba2Config:
    given = dict(vocab_size=TOKENS, hidden_size=16, num_hidden_layers=2, state_size=4, num_heads=2, head_dim=16)
    return Mamba2Config(**{**given, **sizes}, expand=2, n_groups=1, chunk_size=8, use_cache=False)


def trained(module, rows: list[list[int]], steps: int = 80) -> Model:
    """The module after a short training on the next token."""
    ids = torch.tensor(rows)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    module.train()
    with fast_scan(module):
        for _ in range(steps):
            chosen = torch.randint(len(ids), (24,), generator=generator)
            logits = module(input_ids=ids[chosen]).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[chosen][:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Model(module, name="tiny")


@pytest.fixture(scope="module")
def language() -> Model:
    torch.manual_seed(0)
    return trained(Mamba2ForCausalLM(backbone()), chain(200, 16, seed=0))


@pytest.fixture(scope="module")
def fitted(language, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lens") / "fitted"
    data = chain(160, 16, seed=1)
    return fit_into(out, language, data, steps=80, batch_tokens=400, look_every=20, held_out=0.3, progress=False)


class TestDivergences:
    def slow(self, normed: torch.Tensor, head: torch.nn.Linear):
        """torch's own divergence, layer by layer and position by position."""
        normed = normed.clone().requires_grad_()
        p = head(normed[-1].detach()).softmax(-1)
        kl = torch.stack(
            [
                torch.stack([(p[at] * (p[at] / head(h).softmax(-1)).log()).sum() for at, h in enumerate(layer)])
                for layer in normed[:-1]
            ]
        )
        (gradient,) = torch.autograd.grad(kl.sum(), normed)
        return kl.detach(), gradient[:-1]

    @pytest.mark.parametrize("at_once", [1, 300, 10**6])
    def test_are_those_of_a_slow_loop(self, at_once, monkeypatch):
        monkeypatch.setitem(lenses.MAX_LOGITS, "cpu", at_once)
        torch.manual_seed(0)
        head = torch.nn.Linear(6, 9).double()
        normed = torch.randn(4, 7, 6, dtype=torch.float64)
        kl, gradient = divergences(normed, head, gradient=True)
        slow, slope = self.slow(normed, head)
        torch.testing.assert_close(kl, slow, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-12)
        assert torch.equal(divergences(normed, head).kl, kl) and divergences(normed, head).gradient is None
        assert (kl > 0).all()

    def test_summed_by_row(self, language):
        rows = Rows("r", "all", tuple(map(tuple, [*chain(5, 9, 3), *chain(4, 17, 4)])))
        tuned = logit_lens(language).tuned
        generator = torch.Generator().manual_seed(0)
        lens = (0.1 * torch.randn(2, 16, 16, generator=generator), torch.randn(2, 16, generator=generator))
        for positions in ("every", "last"):
            (found,) = measure(language, tuned.unembed, rows, positions, [lens])
            for row in range(len(rows)):
                states = chosen_states(language, rows.batch(language, [row]), positions)
                p = tuned.unembed(states[-1]).log_softmax(-1)
                for layer in range(2):
                    moved = states[layer] + torch.nn.functional.linear(states[layer], lens[0][layer], lens[1][layer])
                    q = tuned.unembed(moved).log_softmax(-1)
                    slow = (p.exp() * (p - q)).sum().item()
                    assert found.kl[row, layer] == pytest.approx(slow, rel=1e-4)
                assert found.asked[row] == (len(rows.ids[row]) if positions == "every" else 1)
            assert found.means == pytest.approx(found.kl.sum(0) / found.asked.sum())


class TestRows:
    def test_of_a_text_end_before_its_padding(self, language):
        lines = ["a b c d", "a c", "d"]
        tokenizer = word_tokenizer(lines)
        data = language_data(lines, tokenizer, length=4)
        assert (data.targets == IGNORED).sum() == 3
        model = dataclasses.replace(language, tokenizer=tokenizer)
        assert rows_of(model, data).lengths == [4, 4, 1]
        assert rows_of(model, ["a b", "d"]).ids == ((2, 5), (4,))  # after <unk> and <eos> the most frequent words
        inner = TokenData("asked", "test", np.ones((2, 3), int), np.array([[5, -100, -100], [-100, 5, -100]]), ("a",))
        assert rows_of(model, inner).lengths == [3, 2]

    def test_of_sequences_and_images(self, language):
        sequences = SequenceData("s", "test", np.ones((4, 3), int), np.zeros(4, int), ("a", "b"), ("x",))
        assert rows_of(language, sequences).lengths == [3] * 4
        images = PixelData("i", "test", np.zeros((4, 6, 3), np.uint8), np.zeros(4, int), ("x",), (2, 3))
        sees = Model(SSMForSequenceClassification(SSMClassifierConfig(backbone(vocab_size=1), channels=3)))
        rows = rows_of(sees, images)
        assert rows.lengths == [7] * 4 and rows.batch(sees, [0, 2]).values.shape == (2, 6, 3)
        refuses("reads tokens, but i holds images", rows_of, language, images)
        refuses("reads pixels, but s holds tokens", rows_of, sees, sequences)
        assert rows.take([1]).fingerprint != rows.fingerprint == rows_of(sees, images).fingerprint

    def test_what_is_refused(self, language):
        for given, says in (
            ([], r"texts \(all\) is empty"),
            ("a text", "data is str; allowed are rows of tokens"),
            (5, "data is int; allowed are"),
            ([[1, 2], [99]], "token id 99, outside the model's 0…19"),
            (["a", "b"], "text 0: tiny has no tokenizer"),
        ):
            refuses(says, rows_of, language, given)

    def test_batches(self):
        lengths = np.random.default_rng(0).integers(1, 30, 200).tolist()
        first, again, second = (shuffled_batches(lengths, 100, 5, epoch) for epoch in (0, 0, 1))
        assert first == again != second != shuffled_batches(lengths, 100, 6, 1)
        for order in (first, second):
            assert sorted(row for batch in order for row in batch) == list(range(200))
            assert all(sum(lengths[row] for row in batch) <= 100 for batch in order)
        assert shuffled_batches([500, 3], 100, 0, 0) in ([[0], [1]], [[1], [0]])


class TestFit:
    def test_is_nearer_to_the_model_at_every_layer(self, fitted, language):
        result = LensFit.load(fitted / "lens.json")
        assert [one.layer for one in result.layers] == [0, 1]
        for one in result.layers:
            assert one.gained.low > 0 and one.tuned.value < 0.7 * one.logit.value
            assert one.gained.value == pytest.approx(one.logit.value - one.tuned.value)
            assert one.tuned.low < one.tuned.value < one.tuned.high
        assert result.tuned.value == pytest.approx(np.mean([one.tuned.value for one in result.layers]))
        assert result.history[0].step == 0 and result.best_step > 0
        assert min(each.held_out for each in result.history) < 0.7 * result.history[0].held_out
        views = {"lens.csv", "lens.png", "lens.html"}
        assert {path.name for path in fitted.iterdir()} == {"config.json", "params.pt", "lens.json", *views}

    def test_numbers_are_those_of_the_lens_on_rows_left_out(self, fitted, language):
        result, lens = LensFit.load(fitted / "lens.json"), load_lens(fitted, language)
        train, held = split_rows(rows_of(language, chain(160, 16, seed=1)), 0.3, 0)
        choosing, measured = training.split_held_out(held)
        assert not {*train.ids} & {*measured.ids} and not {*choosing.ids} & {*measured.ids}
        assert result.provenance["data"]["measured"]["fingerprint"] == measured.fingerprint
        assert (result.rows, result.measured) == (24, 24 * 16)
        states = chosen_states(language, measured.batch(language, range(24)), "every")
        for one, name in ((lens, "tuned"), (logit_lens(language), "logit")):
            logs = one.log_probs(states)
            means = ((logs[-1] - logs) * logs[-1].exp()).sum(-1).mean(1)
            for layer in result.layers:
                assert getattr(layer, name).value == pytest.approx(means[layer.layer].item(), rel=1e-4)
        assert lens.fit == result and lens.positions == "every"

    def test_is_repeated_by_its_seed_alone(self, language, tmp_path):
        data, drawn = chain(30, 12, seed=8), torch.get_rng_state()
        np.random.seed(3)
        numpy = np.random.get_state()[1].copy()
        runs = [fit_into(tmp_path / str(i), language, data, **QUICK, seed=i // 2) for i in range(3)]
        assert torch.equal(torch.get_rng_state(), drawn) and (np.random.get_state()[1] == numpy).all()
        first, again, other = (torch.load(run / "params.pt", weights_only=True) for run in runs)
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not torch.equal(first["0.weight"], other["0.weight"])


class TestContinuing:
    def test_a_killed_fit_ends_as_an_unbroken_one(self, language, tmp_path, capfd):
        language.module.save_pretrained(tmp_path / "model")
        data = chain(40, 12, seed=9)
        given = dict(steps=60, batch_tokens=60, look_every=20, checkpoint_minutes=0.0, held_out=0.2)
        broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
        state = broken / "checkpoint" / "state.pt"
        arguments = [str(tmp_path / "model"), json.dumps(data), str(broken), json.dumps(given)]
        step = killed(SCRIPT, arguments, state, lambda saved: saved["step"] >= 25)["step"]
        assert 25 <= step < 60 and not (broken / "lens.json").exists()
        model = ssmscope.load(tmp_path / "model")
        for ask in (lambda: load_lens(broken, model), lambda: ssmscope.load(broken)):
            refuses("broken is unfinished: .* the same command continues it$", ask)
        for out in (broken, unbroken):
            fit_lens(model, data, out, **given)
        assert capfd.readouterr().err.count(f"continuing after {step} steps") == 1
        one, other = (torch.load(out / "params.pt", weights_only=True) for out in (broken, unbroken))
        assert all(torch.equal(one[name], other[name]) for name in one) and one["0.weight"].any()
        one, other = (LensFit.load(out / "lens.json") for out in (broken, unbroken))
        assert one.history == other.history and one.layers == other.layers and one.best_step == other.best_step
        assert not (broken / "checkpoint").exists()

    def test_one_killed_between_its_files_is_unfinished(self, fitted, language, tmp_path):
        """tuned-lens's own files alone would be read as a lens of tuned-lens."""
        half = tmp_path / "half"
        shutil.copytree(fitted, half)
        (half / "checkpoint").mkdir()
        (half / "checkpoint" / "plan.json").write_text("{}")
        assert load_lens(half, language).fingerprint == language.fingerprint
        (half / "lens.json").unlink()
        refuses("is unfinished", load_lens, half, language)

    def test_a_finished_fit_is_left_as_it_is(self, fitted, language):
        before = {path.name: path.stat().st_mtime_ns for path in fitted.iterdir()}
        (fitted / "checkpoint").mkdir()
        given = dict(steps=80, batch_tokens=400, look_every=20, held_out=0.3, progress=False)
        again = fit_lens(language, chain(160, 16, seed=1), fitted, **given, checkpoint_minutes=1.0)
        assert again == LensFit.load(fitted / "lens.json")
        assert {path.name: path.stat().st_mtime_ns for path in fitted.iterdir()} == before
        other = Model(Mamba2ForCausalLM(backbone()).eval())
        for model, data, changed, says in (
            (language, chain(160, 16, seed=1), {"steps": 81}, r"another fit \(steps was 80 and is now 81\)"),
            (language, chain(160, 16, seed=1), {"seed": 1}, r"another fit \(another seed\)"),
            (language, chain(160, 24, seed=2), {}, r"another fit \(another data\)"),
            (other, chain(160, 16, seed=1), {}, r"another fit \(another model\)"),
        ):
            refuses(says, fit_lens, model, data, fitted, **{**given, **changed})

    def test_other_directories_are_refused(self, language, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        for out in (tmp_path, tmp_path / "notes.txt"):
            with pytest.raises(InputError, match="exists and holds no lens of ours; give a new or empty directory"):
                fit_lens(language, chain(9, 9, 0), out, **QUICK)
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
        with pytest.raises(InputError, match="cannot write to .*notes.txt|exists and holds no lens"):
            fit_lens(language, chain(9, 9, 0), tmp_path / "notes.txt" / "lens", **QUICK)


@pytest.mark.parametrize(("options", "says"), [
    (dict(optimizer="sgdd"), "unknown optimizer 'sgdd'; allowed are sgd, adam; did you mean 'sgd'?"),
    (dict(positions="first"), "unknown positions 'first'; allowed are every, last"),
    (dict(steps=0), "steps is 0; allowed is a whole number from 1"),
    (dict(learning_rate=0), "learning_rate is 0.0; allowed is a number above 0 and below 1,000,000"),
    (dict(weight_decay=-1), "weight_decay is -1.0; allowed is a number from 0"),
    (dict(clip=float("nan")), "clip is nan; allowed is a number above 0"),
    (dict(patience=0), "patience is 0"),
    (dict(checkpoint_minutes=-1), "checkpoint_minutes is -1"),
    (dict(held_out=1.0), "held_out is 1.0; allowed is a number above 0 and below 1"),
    (dict(validation=[[1, 2]]), "has 1 row; held out must be at least 2"),
])  # fmt: skip
def test_what_is_refused(language, tmp_path, options, says):
    assert says in refused(fit_lens, language, chain(9, 9, 0), tmp_path / "lens", **{**QUICK, **options})
    assert not (tmp_path / "lens").exists()


def test_a_damaged_model_is_refused(language, tmp_path):
    damaged = Model(Mamba2ForCausalLM(backbone()).eval())
    with torch.no_grad():
        damaged.module.backbone.layers[0].mixer.D[0] = torch.nan
    with pytest.raises(InputError, match="is damaged: 1 of the .* numbers of .*D are not finite|are not finite"):
        fit_lens(damaged, chain(9, 9, 0), tmp_path / "lens", **QUICK)
