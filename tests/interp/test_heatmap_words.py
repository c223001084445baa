"""Words of heatmaps: punctuation, special and unknown tokens, half-lives of short texts, chance, and long texts."""

import dataclasses
import math
import re

import numpy as np
import pytest
import ssmscope
from ssmscope.core.bootstrap import Estimate
from ssmscope.data.text import text_data
from ssmscope.interp.heatmap.over_data import _chosen
from ssmscope.render.blocks import TokenRow, TokenText
from ssmscope.render.token_figure import MAX_BOXES
from ssmscope.render.token_rows import MAX_PAGE_TOKENS, window_note, windows

model = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/sst2-mamba2"))


def share(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def test_punctuation_and_special_tokens_are_named_with_their_shares(model):
    trace = model.trace(["A dull, lifeless film."])
    found, own = ssmscope.heatmap(trace), trace.survival()[:, 0].numpy()
    mean, last = own.mean(0), own[-1]
    (at,) = (at for at, token in enumerate(trace.tokens[0]) if token == ".")
    assert last[at] == last.max() > 0.5
    for said in (found.headline, found.verdict(), str(found.to_html()), found.token_rows().texts[0].about):
        assert f"“.” [UNK] {share(mean[at])}" in said and f"“,” {share(mean[2])}" in said, said
        assert f"[CLS] {share(mean[-1])}" in said and f"in layer 1 “.” [UNK] holds {share(last[at])}" in said
    named = ssmscope.heatmap(trace, punctuation=True)
    words = f"“.” [UNK] {share(mean[at])}, “,” {share(mean[2])} of the states"
    assert named[0].rationale == (at, 2) and words in named.headline and named.headline.count("“.”") == 1
    assert f"; [CLS] {share(mean[-1])}; in layer 0 [CLS] holds {share(own[0][-1])}" in named.headline


def test_unknown_tokens_are_named_and_counted(model):
    text = "a film 映画はとても面白かった"
    ids = model.tokenizer(text)["input_ids"]
    unknown = [at for at, i in enumerate(ids) if i == model.tokenizer.unk_token_id]
    trace = model.trace([text])
    found = ssmscope.heatmap(trace)
    assert list(found[0].unknown) == unknown and len(unknown) == 11
    assert f"{len(unknown)} of {len(ids)} tokens [UNK]" in found.headline
    assert f"“映画はとても面白かった” [UNK] {share(found[0].mean[unknown].sum())}" in found.headline
    merged = ssmscope.heatmap(trace, merge=True)
    assert merged[0].unknown == (2,) and "[UNK]" not in ssmscope.heatmap(model, "a film").headline
    data = text_data("d", "all", [f"{text} {end}" for end in ("is", "was", "the", "of", "and")], [0] * 5, ("negative",))
    over = ssmscope.heatmap(model, data)
    assert {"[UNK]"} <= {each.word for each in over.words} and "映" not in str(over.to_frame()["name"].tolist())
    assert any("does not know 55 of 75 tokens" in note for note in over.notes)


def test_half_lives_are_no_longer_than_the_texts(model):
    texts = ["a film for the whole family", "a dull film for the family"] * 4
    longest = max(len(model.tokenizer(text)["input_ids"]) for text in texts)
    found = ssmscope.heatmap(model, text_data("d", "all", texts, [0, 1] * 4, ("negative", "positive")))
    shown = [int(each) for each in re.findall(r"> (\d+)", str(found))]
    assert shown and set(shown) == {longest - 1 if longest < 257 else 256} and found.longest == longest - 1
    one = ssmscope.heatmap(model, texts[0], half_lives=True)
    lives, own = one[0].half_lives, model.trace(texts[0]).layers[0].half_lives()[0].numpy()
    assert np.isnan(lives[:, -1]).all() and np.array_equal(lives[0, :-1], own[:-1])
    assert not re.search(r"more than \d", str(one)) and (lives[np.isfinite(lives)] < longest).all()


def test_the_last_written_token_has_no_half_life():
    found = ssmscope.generate(ssmscope.load("demo/books-mamba2"), ["It was a"], max_new_tokens=4)
    lives = found.tables()[0]
    at = lives.columns.index("half-life") if "half-life" in lives.columns else None
    assert at is not None and np.isnan(found[0].half_lives[:, -1]).all()
    rows = [[cell.text for cell in cells] for _, cells in lives.rows]
    assert rows[-1][at] == "–" and "∞" not in str(found)
    infinite = [len(found[0]) - 1 - place for place in found[0].written[:-1]
                if math.isinf(np.median(found[0].half_lives[:, place]))]  # fmt: skip
    assert [f"> {after}" for after in infinite] == [row[at] for row in rows[:-1] if row[at].startswith(">")]


def test_a_word_whose_interval_holds_an_even_share_is_not_the_highest(model):
    texts = ["a film", "a dull film", "the film is dull", "a fine film", "the fine film"] * 2
    found = ssmscope.heatmap(model, text_data("d", "all", texts, [0] * 10, ("negative",)))

    def said(*kept: tuple[float, float, float]) -> str:
        words = zip(("w0", "w1", "w2"), kept)
        made = [dataclasses.replace(found.words[0], word=word, kept=Estimate(*each)) for word, each in words]
        return dataclasses.replace(found, words=tuple(made)).verdict()

    assert said((1.6, 0.7, 2.4), (0.9, 0.6, 1.4)).startswith("no word's interval lies above or below an even share")
    assert said((1.6, 1.2, 2.4), (1.5, 0.7, 2.4), (0.5, 0.3, 0.8)).startswith("highest: “w0” 1.600 [1.200, 2.400]")
    assert "then" not in said((1.6, 1.2, 2.4), (1.5, 0.7, 2.4)) and "lowest" not in said((1.6, 1.2, 2.4))
    assert said((1.5, 0.7, 2.4), (0.5, 0.3, 0.8)).startswith("lowest: “w1”")
    # Five texts with one occurrence each: w0 scores 1 ± .4 and w1 exactly 1.5.
    entries = np.array([[0] * 5 + [1] * 5, [*range(5)] * 2, [0.2, 1.8, 1.0, 2.0, 1.5] + [1.5] * 5, [1] * 10])
    assert _chosen(entries, 2, 5, 10, 0).tolist() == [1]
    assert _chosen(np.vstack([entries[:2], entries[2:3] - 0.6, entries[3:]]), 2, 5, 10, 0, above=1.0).tolist() == []


def long_text(count: int, marked: tuple[int, ...]) -> TokenText:
    scores = np.zeros(count, dtype=np.float32)
    row = TokenRow("mean", scores, (0.0, 1.0), False, np.zeros(count, dtype=bool), marked)
    return TokenText(tuple(f"t{at}" for at in range(count)), tuple(range(count)), [row], "x", 1.0)


@pytest.mark.parametrize("most", [MAX_BOXES, MAX_PAGE_TOKENS])
def test_a_long_text_shows_its_end_and_the_marked_words(most):
    count, marked = 3 * most, (40, most + 7, 3 * most - 1)
    text = long_text(count, marked)
    shown = windows(text, most)
    assert len(shown) == most and shown == sorted(set(shown))
    assert {*range(count - most // 2, count)} <= {*shown}
    for at in marked:
        assert {*range(at - 8, min(at + 8, count))} <= {*shown}
    assert windows(long_text(count, ()), most) == [*range(count - most, count)]
    assert windows(long_text(most, marked[:1]), most) == [*range(most)] and window_note(long_text(9, ()), most) == ""
    many = windows(long_text(count, tuple(range(0, most, 2))), most)
    assert len(many) <= most and {0, count - 1} <= {*many}
