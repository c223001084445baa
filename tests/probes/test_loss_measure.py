"""Windows that run together, positions of a curve, and files that are rows of documents."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refuses
from ssmscope.core.bootstrap import estimates, resampled_sums
from ssmscope.errors import InputError
from ssmscope.probes.loss import measure
from ssmscope.probes.loss.measure import (
    all_losses,
    documents,
    notes_on,
    positions_of,
    shared_windows,
    summarise,
    windows_of,
)
from ssmscope.zoo.documents import symbol_tokenizer


@pytest.mark.parametrize(
    ("length", "piece", "sizes"), [(30, 20, [5, 2]), (10, 20, [7]), (40, 1000, [2, 2, 2, 1]), (300, 200, [1] * 7)]
)
def test_windows_run_in_batches_of_the_tokens_that_suit_the_device(monkeypatch, length, piece, sizes):
    """Only a piece of each window runs at a time."""
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


def test_documents_that_are_no_texts(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"text": "a \\ud800"}\n')
    refuses(r"line 2 has \\ud800, which is not a character", documents, rows, None)
    for data in ((), ("a", 3), (3,)):
        refuses("data holds no text, or something that is not a text", documents, data, None)


def model_of(tokenizer, name: str = "m"):
    return SimpleNamespace(tokenizer=tokenizer, vocabulary=len(tokenizer), name=name)


def test_symbols_have_no_newline():
    tokenizer = symbol_tokenizer(["a", "b", "c"])
    ids = tokenizer.convert_tokens_to_ids(["a", "b", "c"])
    tail = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    windows, left_out = windows_of(model_of(tokenizer), [["a b", "c a"]], 2)
    stream = [ids[0], ids[1], *tail, ids[2], ids[0], *tail]
    assert windows.tolist() == [stream[at : at + 3] for at in range(0, len(stream) - 2, 2)] and left_out == 0
    for given, longest in (([["a b"], ["c"], []], 2 + len(tail)), ([[]], 0)):
        with pytest.raises(InputError, match=f"window of 9 tokens and one more: the longest has {longest}; give"):
            windows_of(model_of(tokenizer), given, 9)


def test_models_share_names_and_windows(monkeypatch):
    one, other = symbol_tokenizer(["a", "b"]), symbol_tokenizer(["a", "c"])
    found = {"A": [[1, 2]], "B": [[1, 2]], "C": [[2, 1]]}
    monkeypatch.setattr(measure, "windows_of", lambda model, documents, length: (np.array(found[model.name]), 7))
    given = model_of(one, "A"), model_of(one, "B"), model_of(other, "B"), model_of(one, "C")
    windows, left_out = shared_windows(given[:2], [], 1)
    assert windows.tolist() == [[1, 2]] and left_out == 7 and shared_windows(given[:1], [], 1)[1] == 7
    for second in given[2:]:
        refuses(f"A and {second.name} do not share a tokenizer", shared_windows, (given[0], given[1], second), [], 1)


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
