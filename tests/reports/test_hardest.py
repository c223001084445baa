"""Results of attacks: planted losses, the hardest examples, the worst findings, and what is asked about them next."""

from types import SimpleNamespace

import pytest
import reported
from fading import fading
import ssmscope
from ssmscope.api.scores import Score
from ssmscope.attacks.noise.typos import with_typos
from ssmscope.data.text import load_text
from ssmscope.reports import audit_page, hardest
from ssmscope.reports.hardest import Broken, Hard, broken_by, worst_findings
from ssmscope.reports.page import render
from ssmscope.reports.plan import read_plan
from ssmscope.reports.store import Report

WEIGHTS = {"fine": 1.0, "awful": -1.0, "film": 0.0, "so": 0.0}
ROWS = [("awful film so long", "bad"), ("fine film so short", "good"), ("film", "bad")]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in ROWS))
    return path


def entry(verb, result, file, **more):
    options = {"data": str(file), "split": None, "limit": None, "seed": 0, **more}
    return reported.entry(verb, result, heading=verb, models=("own",), options=options)


def data(file):
    return load_text(file)


def test_typing_errors_are_made_again(file):
    model = fading(WEIGHTS)
    result = ssmscope.noise(model, data(file), rates=[0.1, 0.9])
    found = list(broken_by(entry("noise", result, file)))
    assert found, "every letter of the word that decides has an error with probability 0.9"
    for one in found:
        row = [text for text, _ in ROWS].index(one.text)
        assert result.right[0, row]
        at = int((~result.right[1:, row]).argmax())
        assert one.attacked == with_typos(one.text, (0.1, 0.9)[at], 0)
        assert one.how == f"typing errors at a rate of {(10, 90)[at]} %"


def test_phrases_are_inserted_again(file):
    model = fading(WEIGHTS)
    result = ssmscope.insertion(model, data(file), insert="fine fine", places=2)
    found = {one.text: one for one in broken_by(entry("insertion", result, file))}
    for text, one in found.items():
        assert one.attacked in (f"fine fine {text}", f"{text} fine fine")
        assert one.how in ("“fine fine” inserted at 0 %", "“fine fine” inserted at 100 %")
    lost = (result.right[0] & ~result.right[1:].all(0)).sum()
    assert len(found) == lost > 0


def test_other_data_are_not_taken_for_these(file):
    result = ssmscope.insertion(fading(WEIGHTS), data(file), insert="fine fine", places=2)
    file.write_text(file.read_text() + "fine,good\n")
    hardest._loaded.cache_clear()
    assert list(broken_by(entry("insertion", result, file))) == []
    file.unlink()
    hardest._loaded.cache_clear()
    assert list(broken_by(entry("insertion", result, file))) == []


def report(*entries, **more):
    return Report("audit", tuple(entries), {"models": {"own": {"kind": "text-classifier"}}}, **more)


def test_the_hardest_are_broken_most_often(monkeypatch):
    broken = {"a": ["x", "y"], "b": ["y"], "c": ["z", "y", "x"]}
    entries = [SimpleNamespace(name=name) for name in broken]

    def planted(entry):
        return iter(Broken("own", entry, text, None, "so") for text in broken[entry.name])

    monkeypatch.setattr(hardest, "broken_by", planted)
    found = hardest.hardest(SimpleNamespace(entries=entries), 2)
    assert [(one.text, [each.entry.name for each in one.broken]) for one in found] == [
        ("y", ["a", "b", "c"]), ("x", ["a", "c"]),
    ]  # fmt: skip


def test_the_worst_are_those_that_surely_lose_most(monkeypatch):
    losses = {
        "position": [("position.drop", 0.5, 0.1, True), ("position.drop[0%:10%]", 0.9, 0.8, False)],
        "noise": [("noise.drop", 0.4, 0.35, True)],
        "words": [("words.success[deepwordbug]", 0.6, 0.5, True), ("words.accuracy[deepwordbug]", 0.99, 0.98, False)],
        "overflow": [("overflow.drop[after, 512 tokens]", 0.3, 0.2, True)],
        "insertion": [("insertion.drop", 0.9, -0.01, True)],
    }

    def entry(name):
        found = [
            Score(name, "own", value, low, value + 0.1, 9, "", "share", harm=harm)
            for name, value, low, harm in losses[name]
        ]
        return SimpleNamespace(
            heading=name, results=(SimpleNamespace(card_scores=lambda models: found),), models=("own",)
        )

    monkeypatch.setattr(hardest, "broken_by", lambda entry: iter(()))
    found = worst_findings(SimpleNamespace(entries=list(map(entry, losses))))
    assert [one.score.name for one in found] == [
        "words.success[deepwordbug]", "noise.drop", "overflow.drop[after, 512 tokens]",
    ]  # fmt: skip


def test_losses_of_right_answers_are_harms():
    """Means over regions or rates are, and no control: filler before the text."""
    model, texts = ssmscope.load("demo/sst2-mamba2"), [("a gripping film", "positive"), ("a dull film", "negative")]
    found = {
        one.name: one.harm
        for result in (
            ssmscope.position(model, texts),
            ssmscope.noise(model, texts, rates=[0.2]),
            ssmscope.overflow(model, texts, lengths=[8]),
            ssmscope.insertion(model, texts, places=2),
            ssmscope.words(model, texts, budget=1),
        )
        for one in result.card_scores()
    }
    assert {name for name, harm in found.items() if harm} == {
        "position.drop", "noise.drop", "overflow.drop[after, 8 tokens]", "insertion.drop",
        *(name for name in found if name.startswith("words.success")),
    }  # fmt: skip
    assert found["noise.drop[20 %]"] is found["overflow.drop[before, 8 tokens]"] is False


def test_the_hardest_are_explained_and_patched(monkeypatch):
    model = "demo/sst2-mamba2"
    plan = read_plan(f"hardest: 2\nmodels: [{{model: {model}, name: own}}]\nanalyses: [stability]\n")
    same = Broken("own", reported.entry("words"), "a gripping film", "a bad film", "so")
    longer = Broken("own", reported.entry("noise"), "a dull film", "a dull dull film", "so")
    made = report(hardest=(Hard("a gripping film", (same,)), Hard("a dull film", (longer,))))
    monkeypatch.setattr(hardest, "hardest", lambda report, number: made.hardest[:number])
    calls = hardest.follow_up(plan, made).calls
    assert [call.call.name for call in calls] == ["explain", "patch"]
    assert list(calls[0].call.inputs["text"]) == ["a gripping film", "a dull film"]
    options = {**calls[1].call.inputs, **calls[1].call.options}
    assert (options["clean"], options["corrupted"]) == ("a gripping film", "a bad film")


def test_the_page_names_them_and_links(file):
    result = ssmscope.insertion(fading(WEIGHTS), data(file), insert="fine <fine>", places=2)
    first = entry("insertion", result, file)
    broken = Broken("own", first, "awful <b>", "awful <b> fine", "a <phrase>")
    explained = reported.entry("explain", heading=hardest.EXPLAINED, models=("own",), options={"text": ["awful <b>"]})
    page = render(report(first, explained, hardest=(Hard("awful <b>", (broken, broken)),)))
    assert "Example 1: 2 of its answers change, on 1 model" in page
    assert "awful &lt;b&gt;<ins> fine</ins>" in page and "a &lt;phrase&gt;" in page and "<b>awful" not in page
    assert '<a href="#the-hardest-examples-what-their-answers-rest-on--1">explanation of own</a>' in page
    assert '<a href="#insertion--1">insertion</a>' in page
    assert audit_page.closing(report(first), {}) == ""
