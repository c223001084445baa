"""Fidelity AUC as its users meet it: tables, files, views, and the table of several models."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
import re

import numpy as np
import pytest
import torch
from bags import bag, by_position, by_word, texts
from drawn import drawn, outside, overlapping
from faithful import WORDS, lines, random_scores, reader

import ssmscope
from ssmscope.api.results import Result
from ssmscope.errors import InputError
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.fidelity import fidelity_auc
from ssmscope.interp.fidelity.measure import trapezoid
from ssmscope.interp.fidelity.measures import MEASURES
from ssmscope.interp.fidelity.result import Fidelity, fidelity_table


@pytest.fixture(scope="module")
def found() -> Fidelity:
    toys = {"own": random_scores, "first_$x$": by_position, "tied": by_word(dict.fromkeys(WORDS, 1.0))}
    return fidelity_auc(reader(), texts(*lines(15, seed=1), "a"), methods=toys)


class TestHeadline:
    """The best is named as far as paired differences tell it from others; the random rankings are not a method."""

    def result(self, found: Fidelity, *delta: float, apart: float = 0.01) -> Fidelity:
        """So large ΔA of the three methods and of the random rankings, differences with intervals of ± `apart`."""
        estimates = np.full((4, len(found.measures), 3), 0.125)
        place = found.measures.index("delta")
        for row, value in enumerate(delta):
            estimates[row, place] = value, value - 0.5, value + 0.5
        paired = np.full((6, len(found.measures), 3), math.nan)
        for row, (a, b) in enumerate(itertools.combinations(delta, 2)):
            paired[row, place] = a - b, a - b - apart, a - b + apart
        return dataclasses.replace(found, estimates=estimates, paired=paired)

    def test_random_rankings_are_never_the_best(self, found):
        result = self.result(found, 0.25, -0.5, 0.375, 0.75)
        assert result.headline.endswith("best ΔA 0.375 of tied, no better than random rankings")
        assert result.verdict() == "ΔA 0.375 [−0.125, 0.875] of tied, the best of 3"
        assert self.result(found, 0.25, -0.5, 0.375, 0.1).headline.endswith(": best ΔA 0.375 of tied")

    def test_what_cannot_be_told_from_the_best(self, found):
        result = self.result(found, 0.25, 0.5, 0.375, 0.1, apart=0.2)
        assert result.headline.endswith("best ΔA 0.500 of first_$x$, indistinguishable from 1 other")
        assert result.verdict() == "ΔA 0.500 [0.000, 1.000] of first_$x$, the best of 3"
        result = self.result(found, 0.25, 0.5, -0.375, 0.1, apart=2)
        assert result.verdict() == "ΔA 0.500 [0.000, 1.000] of first_$x$, not clearly the best of 3"
        assert result.headline.endswith("ΔA −0.375 to 0.500, no method clearly best, no better than random rankings")


class TestResult:
    def test_intervals_and_differences_are_paired(self, found):
        for a, b in found.pairs:
            for place, measure in enumerate(found.measures):
                own = [found.random if name == "random" else found.values[found.methods.index(name)] for name in (a, b)]
                apart = (own[0] - own[1])[:, place]
                e = found.difference(a, b, measure)
                assert e.value == pytest.approx(apart.mean()) and e.low <= e.value <= e.high
                back = found.difference(b, a, measure)
                assert (back.value, back.low, back.high) == (-e.value, -e.high, -e.low)
                assert (e.high - e.low) == pytest.approx(4 * apart.std() / len(apart) ** 0.5, rel=0.35, abs=1e-9)
        assert found.difference("own", "own").value == 0

    def test_one_token_has_no_ranking(self, found):
        short = [at for at, text in enumerate([*lines(15, seed=1), "a"]) if len(text.split()) == 1]
        assert found.texts.tolist() == [at for at in range(16) if at not in short] and len(short) > 1
        assert found.notes[0] == f"{len(short)} of 16 texts have a single token and are left out"
        with pytest.raises(InputError, match="no text of toy .test. has two tokens"):
            fidelity_auc(reader(), texts("a", "b"), methods={"own": by_position})

    def test_ties_are_counted(self, found):
        assert [note for note in found.notes if "position decides" in note][-1].startswith("tied gives 100 %")
        assert not any(note.startswith("first") for note in found.notes)

    def test_the_frames(self, found):
        frame = found.to_frame()
        assert list(frame) == ["model", "method", "measure", "value", "low", "high", "texts", "spread"]
        assert len(frame) == 4 * 5 and set(frame["texts"]) == {len(found.texts)}
        alone = frame.query("method == 'random'")
        assert alone["spread"].to_numpy() == pytest.approx(found.rankings.std(0, ddof=1))
        assert alone["value"].to_numpy() == pytest.approx(found.rankings.mean(0))
        assert frame.query("method != 'random'")["spread"].isna().all()
        curves = found.curves()
        assert len(curves) == 4 * 2 * 21 and (curves["low"] <= curves["mean"]).all()
        assert set(curves["ranking"]) == {"MoRF", "LeRF"} and sorted(set(curves["q"])) == [i / 20 for i in range(21)]
        for method in found.rows:
            for order, measure in (("MoRF", "morf"), ("LeRF", "lerf")):
                mean = curves.query(f"method == {method!r} and ranking == {order!r}")["mean"].to_numpy()
                assert trapezoid(mean) == pytest.approx(found.estimate(method, measure).value)
        assert len(found.differences()) == 6 * 5

    def test_round_trip(self, found, tmp_path):
        again = Result.load(found.save(tmp_path, "fidelity")["json"])
        assert isinstance(again, Fidelity) and again == found and again.values.tobytes() == found.values.tobytes()
        assert again.pairs == found.pairs

    def test_the_terminal_view_says_what_was_done(self, found):
        shown = str(found)
        assert found.headline in " ".join(shown.split()) and "replaced by the mean embedding" in " ".join(shown.split())
        assert "20 random rankings" in " ".join(shown.split()) and "minus random" in shown
        assert max(map(len, shown.splitlines())) <= 100

    def test_the_figure_has_no_overlaps(self, found):
        figure, texts = drawn(found)
        assert not overlapping(texts) and not outside(figure, texts)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"mode": "remove"}, "unknown mode 'remove'; allowed are replace, delete"),
            ({"value": "logits"}, "did you mean 'logit'"),
            ({"replacement": "maen"}, "did you mean 'mean'"),
            ({"steps": 0}, "steps is 0; allowed is a whole number from 1 to 10,000"),
            ({"random_rankings": 19}, "random_rankings is 19; allowed is a whole number from 20 to 100,000"),
            ({"batch_size": 0}, "batch_size is 0"),
            ({"seed": -1}, "seed is -1"),
            ({"limit": 0}, "limit is 0; allowed is a whole number from 1 on"),
            ({"methods": []}, "methods is empty; allowed are ig, "),
            ({"methods": {}}, "no method was given"),
            ({"methods": ["random"]}, "no method was given but random, which is always there"),
            ({"methods": ["igg"]}, "unknown among methods: 'igg'"),
            ({"methods": {"random": by_position}}, "'random' is always there"),
            ({"methods": ["ig", "ig"]}, "methods is ig, ig; name each once"),
            (
                {"methods": ["ig", "random"], "option": {"random": {"seed": 1}}},
                "option is given for 'random', which is not among",
            ),
            ({"option": {"owm": {}}}, "option is given for 'owm', which is not among the methods; did you mean 'own'?"),
            ({"methods": {"own": lambda goal: Scores(torch.zeros(1, 2))}}, "gives scores of shape (1, 2)"),
            ({"methods": {"own": lambda goal: Scores(goal.batch.mask / 0.0)}}, "own are not finite"),
        ],
    )
    def test_refuses(self, options, says):
        with pytest.raises(InputError, match=re.escape(says)) as raised:
            fidelity_auc(
                bag(dict.fromkeys(WORDS, 0.1)), texts("a b", "c d"), **({"methods": {"own": by_position}} | options)
            )
        assert "\n" not in str(raised.value)

    def test_refuses_texts_that_cannot_be_read_and_other_models(self):
        model = bag(dict.fromkeys(WORDS, 0.1))
        with pytest.raises(InputError, match="row 2 of toy .test.: the text has only characters"):
            fidelity_auc(model, texts("a b", "z"), methods={"own": by_position})
        with pytest.raises(InputError, match="has no tokenizer"):
            fidelity_auc(ssmscope.Model(model.module), texts("a b"), methods={"own": by_position})
        broken = bag(dict.fromkeys(WORDS, 0.1), link=lambda total: total / 0)
        with pytest.raises(InputError, match="the logits of bag are not finite"):
            fidelity_auc(broken, texts("a b"), methods={"own": by_position})

    def test_our_methods_by_name(self):
        model, data = reader(), texts(*lines(3, shortest=3))
        named = fidelity_auc(model, data, methods=["gradxinput", "self-write"])
        assert named.methods == ("gradxinput", "self-write") and np.isfinite(named.values).all()


class TestTables:
    def test_measures(self, found):
        rows = found.table().splitlines()
        assert rows[0] == "| Method | ΔA ↑ | A\\_MoRF ↓ | A\\_LeRF ↑ | comprehensiveness ↑ | sufficiency ↓ |"
        assert len(rows) == 2 + 4 and all(row.count(" | ") == 5 for row in rows)
        best = found.best("delta")[0]
        place = found.rows.index(best) + 2
        assert [at for at, row in enumerate(rows) if row.split(" | ")[1].startswith("**")] == [place]
        assert "first\\_$x$" in rows[3] and "**" not in rows[-1]
        latex = found.table(style="latex")
        assert (
            latex.count(r"\\") == 5
            and latex.count(r"\textbf") == sum(len(found.best(name)) for name in MEASURES)
            and r"first\_\$x\$" in latex
        )
        assert latex.startswith("\\begin{tabular}{lrrrrr}\n\\toprule\nMethod & $\\Delta$A $\\uparrow$")
        table = list(csv.DictReader(io.StringIO(found.table(style="csv"))))
        for row in table:
            e = found.estimate(row["method"], "lerf")
            assert [float(row[f"lerf{end}"]) for end in ("", "_low", "_high")] == [e.value, e.low, e.high]
            assert ("delta" in row["best_in"].split(";")) == (row["method"] == best)

    def test_the_best_has_the_least_where_less_is_better(self, found):
        means = {method: found.estimate(method, "morf").value for method in found.methods}
        assert found.best("morf") == (min(means, key=means.get),)
        means = {method: found.estimate(method, "comprehensiveness").value for method in found.methods}
        assert found.best("comprehensiveness") == (max(means, key=means.get),)

    @pytest.fixture
    def several(self, found):
        def of(model, data, factor=1.0, methods=None):
            provenance = {**found.provenance, "model": model, "data": {**found.provenance["data"], "name": data}}
            changed = dataclasses.replace(found, provenance=provenance, estimates=found.estimates * factor)
            return dataclasses.replace(changed, methods=methods) if methods else changed

        return of

    def test_data_sets_and_models(self, found, several):
        results = [several("m|1", "sst2"), several("m|1", "imdb", -1.0), several("m_2", "sst2", 2.0)]
        rows = fidelity_table(results).splitlines()
        assert rows[0] == "| Model | Method | sst2 | imdb | average |" and len(rows) == 2 + 8
        assert rows[2].startswith("| m\\|1 | own | ") and rows[6].endswith(" | – | – |")  # m_2 has no imdb, no average
        assert " 0.000 |" in rows[2].replace("**", "").replace("−", "")[-9:]  # the average of x and −x
        means = {name: found.estimate(name).value for name in found.methods}
        for column, wanted in ((2, max(means.values())), (3, -min(means.values()))):
            marked = [row.split(" | ")[column] for row in rows[2:6] if row.split(" | ")[column].startswith("**")]
            assert marked and all(cell.startswith(f"**{wanted:.3f}**".replace("-", "−")) for cell in marked)
        one = fidelity_table(results[:1], style="latex")
        assert "Model" not in one and "average" not in one and "sst2" in one
        header, *body = fidelity_table(results[:1]).splitlines()
        assert header == "| Method | sst2 |" and [row.split(" | ")[0] for row in body[1:]] == [
            f"| {name}" for name in ("own", *("first\\_$x$",), *found.rows[2:])
        ]
        two = fidelity_table(results, style="latex")
        assert two.count("\\midrule") == 2 and r"m\_2" in two
        table = list(csv.DictReader(io.StringIO(fidelity_table(results, measure="morf", style="csv"))))
        assert [row["model"] for row in table] == ["m|1"] * 4 + ["m_2"] * 4
        assert float(table[0]["average"]) == pytest.approx(0) and table[0]["average_low"] == table[4]["imdb"] == ""

    def test_refuses(self, several):
        one = several("m", "sst2")
        with pytest.raises(InputError, match="two results are of m on sst2"):
            fidelity_table([one, one])
        with pytest.raises(InputError, match="no result was given"):
            fidelity_table([])
        with pytest.raises(InputError, match="there is no measure 'detla'.*did you mean 'delta'"):
            fidelity_table([one], measure="detla")
        with pytest.raises(InputError, match="unknown style 'tex'"):
            one.table(style="tex")
