"""The loss by position against plain forward passes, closed forms and slow loops, and as its users meet it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from examples import HALVES, random_example
from loud import loud
from refusals import refused, refuses
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast
import ssmscope
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.evaluation.forking import Rows
from ssmscope.probes import long_rows
from ssmscope.probes.long_rows import pieces_of
from ssmscope.probes.loss import measure as measuring
from ssmscope.probes.loss import token_loss
from ssmscope.probes.loss.measure import bins_of, slopes, smoothed, window_losses
from ssmscope.zoo.documents import byte_tokenizer, symbol_tokenizer, word_tokenizer

QUIET = {"progress": False}
WORDS = "the old river runs past a mill and every autumn its water turns brown with leaves".split()


def text(words: int, seed: int = 0) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def speaker(seed: int = 0, tokenizer=None) -> Model:
    tokenizer = word_tokenizer([" ".join(WORDS)]) if tokenizer is None else tokenizer
    torch.manual_seed(seed)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=12, num_hidden_layers=2, state_size=4)
    module = loud(MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=1)))
    return Model(module, tokenizer, f"mamba-{seed}")


def slow_losses(model: Model, windows: np.ndarray) -> np.ndarray:
    """One window at a time, in one forward pass."""
    rows = []
    for window in windows.tolist():
        logits = model.logits(model.encode(ids=[window[:-1]]))[0].double()
        rows.append([-float(line.log_softmax(-1)[token]) for line, token in zip(logits, window[1:])])
    return np.array(rows)


class Attends(nn.Module):
    """Adds the mean of all tokens up to each, which no state of the layers holds."""

    def forward(self, hidden, *_, **__):
        return hidden + hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1).view(1, -1, 1)


class TestLosses:
    LANGUAGE = [name for name in HALVES[1] if name not in ("selective-ssm", "selective-ssm-classes")]

    @pytest.mark.parametrize("name", LANGUAGE)
    def test_pieces_are_a_plain_forward_pass(self, name, monkeypatch):
        model = Model(loud(random_example(name)), name=name)
        windows = np.random.default_rng(0).integers(0, model.vocabulary, (3, 24))
        widths = []
        run = long_rows._run
        monkeypatch.setattr(
            long_rows, "_run", lambda *a, **k: widths.append((a[1].shape[1], a[3] is None)) or run(*a, **k)
        )
        found = window_losses(model, windows, piece=5)
        assert found == pytest.approx(slow_losses(model, windows), rel=2e-3, abs=2e-3)
        in_pieces = [(5, True), *[(5, False)] * 3, (3, False)]
        assert widths == in_pieces

    def test_a_model_that_does_not_continue_runs_whole(self, monkeypatch):
        model = speaker()
        model.module.backbone.layers.insert(1, Attends())
        windows = np.random.default_rng(0).integers(0, model.vocabulary, (3, 30))
        expected = slow_losses(model, windows)
        assert window_losses(model, windows, piece=7) == pytest.approx(expected, abs=1e-3)
        monkeypatch.setattr(long_rows, "try_resuming", lambda model, rows: (True, 0))
        refuses("cannot continue from its states", window_losses, model, windows, piece=7)

    def test_batches_and_slices_of_logits_change_nothing_and_bound_memory(self, monkeypatch):
        model = speaker()
        windows = np.random.default_rng(1).integers(0, model.vocabulary, (7, 41))
        whole = window_losses(model, windows)
        sizes, hidden, counted = [], [], []
        head, run = measuring.head_logits, long_rows._run
        monkeypatch.setattr(measuring, "MAX_LOGITS", 6 * model.vocabulary)
        monkeypatch.setattr(measuring, "head_logits", lambda *a: sizes.append(a[1].shape[0]) or head(*a))
        monkeypatch.setattr(long_rows, "max_batch_tokens", lambda model: 20)
        monkeypatch.setattr(long_rows, "count_tokens", counted.append)
        monkeypatch.setattr(long_rows, "_run", lambda *a, **k: hidden.append(a[1].size) or run(*a, **k))
        assert window_losses(model, windows, piece=8) == pytest.approx(whole, abs=1e-4)
        assert max(sizes) == 6 and sum(sizes) == sum(counted) == 7 * 40 and max(hidden) == 16

    def test_rows_that_end_early_leave_the_batch(self):
        """Every token is in one piece, at its own place."""
        model = speaker()
        lengths = np.array([3, 17, 9, 30, 8])
        ids = np.random.default_rng(2).integers(0, model.vocabulary, lengths.sum())
        rows = Rows(ids, np.concatenate([[0], lengths.cumsum()]))
        got = {row: [] for row in range(5)}
        for part in pieces_of(model, rows, piece=8):
            for at, row in enumerate(part.rows):
                assert part.start == sum(map(len, got[row]))
                got[row].append(part.hidden[at, : part.lengths[at]])
                assert part.ends[at] == (sum(map(len, got[row])) == lengths[row])
        for row, parts in got.items():
            own = torch.tensor([ids[rows.starts[row] : rows.starts[row + 1]].tolist()])
            with torch.no_grad():
                expected = model.module.backbone(own, use_cache=False).last_hidden_state[0]
            assert torch.allclose(torch.cat(parts), expected, atol=1e-4)


class TestNumbers:
    def test_the_mean_over_positions_is_the_models_cross_entropy(self):
        model = speaker()
        found = token_loss(model, data=[text(1000), text(450, 1)], length=140, piece=32, **QUIET)
        ids = [model.tokenizer(each)["input_ids"] + [1] for each in (text(1000), text(450, 1))]
        windows = [row[a : a + 141] for row in ids for a in range(0, len(row) - 140, 140)]
        assert len(windows) == 7 + 3 == found.provenance["data"]["windows"]
        total = 0.0
        for window in windows:
            given = torch.tensor([window[:-1]])
            with torch.no_grad():
                logits = model.module(given).logits[0]
            total += float(nn.functional.cross_entropy(logits, torch.tensor(window[1:])))
        (one,) = found.summaries
        assert one.mean.value == pytest.approx(total / len(windows), rel=1e-5)
        assert found.losses.mean() == pytest.approx(one.mean.value, rel=1e-6) and found.bins == ((0, 128), (128, 140))
        assert (128 * one.bins[0].value + 12 * one.bins[1].value) / 140 == pytest.approx(one.mean.value)
        expected = slow_losses(model, np.array(windows)).mean(0)
        assert found.losses[0] == pytest.approx(expected, rel=1e-4)
        assert one.bins[1].value == pytest.approx(expected[128:].mean(), rel=1e-4)
        assert one.slope.value == pytest.approx(
            np.polyfit(np.log2(np.arange(101, 141)), expected[100:], 1)[0], abs=1e-4
        )
        assert one.bins[0].low < one.bins[0].value < one.bins[0].high

    def test_a_slope_is_that_of_the_line(self):
        positions = np.arange(1, 501)
        losses = np.stack([5 - 0.25 * np.log2(positions), 1 + 0.5 * np.log2(positions)])
        losses[:, :100] = 77  # left out
        assert slopes(losses) == pytest.approx([-0.25, 0.5])
        assert np.isnan(slopes(losses[:, :101])).all() and not np.isnan(slopes(losses[:, :102])).any()

    @pytest.mark.parametrize("smooth", [1, 5, 101])
    def test_smoothed_against_a_loop(self, smooth):
        losses = np.random.default_rng(0).random((3, 60))
        for at in range(1, 61):
            near = [i for i in range(1, 61) if abs(i - at) <= min(smooth // 2, at - 1)]
            expected = np.mean([losses[:, i - 1] for i in near], axis=0)
            assert smoothed(losses, [at], smooth)[:, 0] == pytest.approx(expected)
        steep = np.arange(60.0, 0, -1)[None]
        assert smoothed(steep, range(1, 31), smooth)[0] == pytest.approx(steep[0, :30])

    def test_bins(self):
        assert bins_of(100) == [(0, 100)] and bins_of(128) == [(0, 128)]
        assert bins_of(600) == [(0, 128), (128, 512), (512, 600)]
        assert bins_of(5000)[2:] == [(512, 1024), (1024, 2048), (2048, 4096), (4096, 5000)]
        assert bins_of(16384)[-1] == (8192, 16384) and bins_of(512)[-1] == (128, 512)
        assert bins_of(1024)[-1] == (512, 1024) and bins_of(1025)[-1] == (1024, 1025)


class TestWindows:
    def seen(self, model, data, monkeypatch, **options):
        windows = []
        real = measuring.window_losses
        monkeypatch.setattr(measuring, "window_losses", lambda m, w, **k: windows.append(w) or real(m, w, **k))
        found = token_loss(model, data=data, **options, **QUIET)
        return windows[0], found

    def test_a_document_is_cut_and_the_rest_left(self, monkeypatch):
        model = speaker()
        lines = [text(25), "", text(10, 1)]
        stream = [i for line in lines for i in (*model.tokenizer(line)["input_ids"], 1)]
        windows, found = self.seen(model, ["\n".join(lines), text(5)], monkeypatch, length=12)
        assert len(stream) == 38 and windows.tolist() == [stream[a : a + 13] for a in (0, 12, 24)]
        assert found.notes == ("1 document is shorter than a window and not read",)

    @pytest.mark.parametrize("newline", [False, True])
    def test_a_line_ends_with_a_newline_or_the_end_of_a_text(self, newline):
        """Special tokens, which a tokenizer puts around any text, do not stand for a newline."""
        names = ["a", "b", "c", "</s>", *(["\n"] if newline else [])]
        tokenizer = Tokenizer(WordLevel({name: at for at, name in enumerate(names)}, unk_token="a"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(
            Regex("\n" if newline else r"\s+"), "isolated" if newline else "removed"
        )
        tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 3)])
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
        model = SimpleNamespace(tokenizer=fast, vocabulary=len(names), name="m")
        lines = ["b", "c", "a"] if newline else ["b c", "a"]
        stream = [1, 4, 2, 4, 0, 4] if newline else [1, 2, 3, 0, 3]
        windows, left_out = measuring.windows_of(model, [lines, ["b"], []], 2)
        assert windows.tolist() == [stream[:3], stream[2:5]] and left_out == 2
        fast.eos_token = None
        if not newline:
            assert measuring.windows_of(model, [lines], 2)[0].tolist() == [[1, 2, 0]]

    def test_bytes_end_lines_with_a_line_end(self, monkeypatch):
        model = speaker(tokenizer=byte_tokenizer())
        windows, _ = self.seen(model, ["ab\ncd"], monkeypatch, length=5)
        assert bytes(windows[0].tolist()) == b"ab\ncd\n"

    def test_a_limit_draws_windows_in_their_order(self, monkeypatch):
        model = speaker()
        every, _ = self.seen(model, [text(500)], monkeypatch, length=10)
        some, found = self.seen(model, [text(500)], monkeypatch, length=10, limit=8, seed=4)
        places = [every.tolist().index(row) for row in some.tolist()]
        assert places == sorted(set(places)) and len(places) == 8 and places != list(range(8))
        assert (found.provenance["data"]["windows"], found.provenance["data"]["of"]) == (8, 50)
        assert len(found.provenance["data"]["fingerprint"]) == 16
        whole, _ = self.seen(model, [text(500)], monkeypatch, length=10, limit=51)
        assert whole.tolist() == every.tolist()


class TestRefusals:
    @pytest.mark.parametrize("options, said", [
        (dict(length=0), "length is 0; allowed is a whole number from 1 on"),
        (dict(limit=0), "limit is 0"),
        (dict(smooth=10), "smooth is 10; allowed is an odd number"),
        (dict(unit="bit"), "unknown unit 'bit'; allowed are nats, bits; did you mean 'bits'?"),
        (dict(piece=-1), "piece is -1"),
        (dict(length=100), "no document is long enough for a window of 100 tokens and one more"),
        (dict(length=2**40), "no document is long enough for a window of 1,099,511,627,776 tokens"),
        (dict(split="test"), "split 'test' has no meaning for texts"),
        (dict(data=[]), "data holds no text"),
        (dict(data=["a", 3]), "data holds no text, or something that is not a text"),
        (dict(data="wikitext3"), "did you mean 'wikitext2'?"),
    ])  # fmt: skip
    def test_refuses(self, options, said):
        assert said in refused(token_loss, speaker(), **{"data": [text(50)], "length": 10, **QUIET, **options})

    def test_models(self):
        model = speaker()
        for models, said in (
            ([], "no model"),
            (ssmscope.load("demo/sst2-mamba2"), "is a classifier"),
            (Model(model.module, None, "mute"), "mute has no tokenizer"),
            (Model(model.module, word_tokenizer([" ".join([*WORDS, *"xyz"])]), "m"), "outside the vocabulary"),
            (Model(model.module, symbol_tokenizer(["a"]), "m"), "is not a symbol"),
        ):
            assert said in refused(token_loss, models, data=[text(50) + " x y z"], length=10, **QUIET)

    def test_a_loss_that_is_not_finite(self):
        model = speaker()
        with torch.no_grad():
            model.module.lm_head.weight[5] = 3e38
        with pytest.raises(InputError, match="not finite from position 1 on: the model overflows"):
            token_loss(model, data=[text(50)], length=10, **QUIET)
