"""Which windows run together, which positions a curve has, and which files are rows of documents."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from ssmscope.core.bootstrap import estimates, resampled_sums
from ssmscope.probes.loss import measure
from ssmscope.probes.loss.measure import all_losses, documents, notes_on, positions_of, summarise


@pytest.mark.parametrize(
    ("length", "piece", "sizes"), [(30, 20, [5, 2]), (10, 20, [7]), (40, 1000, [2, 2, 2, 1]), (300, 200, [1] * 7)]
)
def test_windows_run_in_batches_of_the_tokens_that_suit_the_device(monkeypatch, length, piece, sizes):
    """Of a window its piece alone runs at a time."""
    windows, seen = np.arange(7 * (length + 1)).reshape(7, -1), []

    def window_losses(model, rows, *, piece):
        seen.append((len(rows), piece))
        return rows[:, 1:] / 2

    monkeypatch.setattr(measure, "window_losses", window_losses)
    monkeypatch.setattr(measure, "max_batch_tokens", lambda model: 100)
    found = all_losses(SimpleNamespace(), windows, piece=piece, provenance={}, shown=False)
    assert seen == [(size, piece) for size in sizes]
    assert found.dtype == np.float32 and found.tolist() == (windows[:, 1:] / 2).tolist()


@pytest.mark.parametrize("length", [1, 7, 240, 5000])
def test_positions_are_even_on_a_logarithmic_axis(length):
    expected = sorted({round(length ** (k / 239)) for k in range(240)})
    assert list(positions_of(length)) == expected and (expected[0], expected[-1]) == (1, length)


def test_files_of_rows_are_told_by_their_suffix(tmp_path):
    rows, plain = tmp_path / "Rows.JSONL", tmp_path / "rows.txt"
    for file in (rows, plain):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a b\nc", "d")))
    assert documents(rows, None) == ([["a b", "c"], ["d"]], str(rows))
    (lines,), name = documents(str(plain), None)
    assert len(lines) == 2 and name == str(plain)
    assert documents(("a\nb", "c"), None) == ([["a", "b"], ["c"]], "texts")


@pytest.mark.parametrize("windows", [1, 35])
def test_all_numbers_share_their_resamples(windows):
    losses = np.random.default_rng(0).random((3, windows, 140)).astype(np.float32)
    found = summarise(losses, (1, 50, 140), 5, seed=4)
    assert found["bins"] == ((0, 128), (128, 140))
    means = losses.astype(np.float64).mean(2)
    sums = resampled_sums(np.concatenate([means, means[:1] - means[1:]]).T, seed=4) / windows
    expected = estimates(sums if windows > 1 else sums[:1])
    for one, wanted in zip([*found["summaries"], *found["differences"]], expected, strict=True):
        assert [one.mean.value, one.mean.low, one.mean.high] == pytest.approx(wanted.tolist(), nan_ok=True)
    for model in range(3):
        for place, around in enumerate((slice(0, 1), slice(47, 52), slice(137, 140))):
            own = losses[model, :, around].astype(np.float64).mean(1)[:, None]
            sums = resampled_sums(own, seed=4) / windows
            wanted = estimates(sums if windows > 1 else sums[:1])[0]
            assert found["curves"][model, place].tolist() == pytest.approx(wanted.tolist(), nan_ok=True)


def test_notes():
    assert list(notes_on(2, 0)) == []
    assert list(notes_on(1, 1)) == [
        "one window: no number has an interval",
        "1 document is shorter than a window and not read",
    ]
    assert list(notes_on(2, 1200)) == ["1,200 documents are shorter than a window and not read"]
