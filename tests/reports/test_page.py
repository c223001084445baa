"""The page of a report in its parts: its contents, texts that stay texts, and the data of its scripts."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import reported
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

import ssmscope
from ssmscope.api.results import Result
from ssmscope.api.scores import Score
from ssmscope.render.blocks import Custom, Picture, Prose, TokenMaps, TokenRows
from ssmscope.render.table import frame_table
from ssmscope.render.tokens import spell_tokens, visible
from ssmscope.reports import page as report_page
from ssmscope.reports.gates import decide
from ssmscope.reports.grouping import LabelledResult, groups, unique_names, verdict
from ssmscope.reports.page import render
from ssmscope.reports.requirements import read_requirement

VOID = {"meta", "link", "img", "input", "br", "wbr", "hr"}
NASTY = (
    "<script>alert(1)</script>",
    "</script><b>",
    '" onmouseover="alert(1)',
    "' \" & &amp; &lt;",
    "<!-- not a comment",
    "{{ 7 * 7 }} {% raw %}",
    "שלום עולם",
    "مرحبا",
    "👩‍👩‍👧 emoji 🎉",
    "]]> \\u003c",
)


CHANGE = "retention, attention"
"""Change of a text as the report shows it, by token."""


class Page(HTMLParser):
    """Elements with their attributes and texts; refuses a page whose elements are not closed in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.stack: list[int] = []
        self.feed(page)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice"
        self.elements.append((tag, dict(attributes), []))
        if tag not in VOID:
            self.stack.append(len(self.elements) - 1)

    def handle_endtag(self, tag):
        assert self.elements[self.stack.pop()][0] == tag

    def handle_data(self, data):
        for at in self.stack:
            self.elements[at][2].append(data)

    def all(self, tag: str, **wanted: str) -> list[tuple[dict[str, str | None], str]]:
        wanted = {name.removesuffix("_"): value for name, value in wanted.items()}
        return [
            (attributes, "".join(texts))
            for name, attributes, texts in self.elements
            if name == tag and all(value in (attributes.get(key) or "").split() for key, value in wanted.items())
        ]

    def islands(self) -> list[dict]:
        """The data of the interactive heatmaps."""
        found = [json.loads(text) for _, text in self.all("script", type="application/json")]
        return [one for one in found if "variant" in one]


@pytest.fixture(scope="module")
def html() -> str:
    return reported.rendered()


@pytest.fixture(scope="module")
def page(html) -> Page:
    return Page(html)


class TestStructure:
    def test_ids_are_unique_and_links_lead_somewhere(self, page):
        ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
        assert len(set(ids)) == len(ids)
        for _, attributes, _ in page.elements:
            href = attributes.get("href") or "#_summary"
            assert href == "data:," or href.removeprefix("#") in ids
            assert set((attributes.get("aria-labelledby") or "").split()) <= set(ids)

    def test_nothing_comes_from_outside(self, html, page):
        for tag, attributes, _ in page.elements:
            for name in ("src", "href", "action", "data", "srcset", "poster", "style"):
                value = attributes.get(name) or ""
                assert not re.search(r"https?:|//\w|url\(", value) or value.startswith("data:"), (tag, name)
            assert not any(name.startswith("on") for name in attributes), "an inline handler"
        for _, style in page.all("style"):
            assert "url(" not in style and "@import" not in style
        assert not page.all("iframe") and not page.all("object") and not page.all("form")

    def test_the_policy_names_every_script_and_nothing_else(self, page):
        (policy,) = [a["content"] for a, _ in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
        scripts = [text for attributes, text in page.all("script") if "type" not in attributes]
        hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts}
        assert len(scripts) == 2  # the page's own, and one for the attention maps of all models
        assert set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
        assert "unsafe" not in rules["script-src"]

    def test_headings_do_not_skip_a_level_and_pictures_have_a_text(self, page):
        levels = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(b <= a + 1 for a, b in zip(levels, levels[1:]))
        assert page.all("img") and all(attributes.get("alt") for attributes, _ in page.all("img"))

    def test_every_entry_has_its_section_command_and_origin(self, page):
        report = reported.real()
        assert len(page.all("article")) == len(report.entries)
        shown = [text for _, text in page.all("code")]
        assert sorted(shown) == sorted(entry.command for entry in report.entries)
        text = "".join(text for _, text in page.all("main"))
        for entry in report.entries:
            assert entry.key in text
            for result in entry.results:
                assert result.provenance["fingerprint"] in text
        assert set(re.findall(r"took([\d.]+ s)", text)) == {"1.2 s"}
        assert "title: tests\nmodels: [demo/…]\n" in [text for _, text in page.all("pre")]

    def test_queries_are_told(self, page):
        origins = [text for _, text in page.all("table", class_="pairs")]
        assert sum(" filled prompts, " in text and " of them run" in text for text in origins) == 2

    def test_without_entries(self):
        empty = Page(render(reported.report(title="Nothing")))
        assert "The report has no entries." in [text for _, text in empty.all("p")]

    def test_gates_come_first(self, page):
        nasty = NASTY[0]
        score = Score("loss", nasty, 2.0, 1.5, 2.5, 10, "lower", "nats")
        gates = decide([read_requirement(f"loss <= 3 at 95 % for {nasty}"), read_requirement("loss < 1")], [score])
        found = Page(render(dataclasses.replace(reported.report(title="Gated"), gates=gates)))
        assert [text for _, text in found.all("h2")][:2] == ["Gates", "Summary"]
        assert "2 gates: 1 missed, 1 met." in [text for _, text in found.all("p")]
        assert [text for _, text in found.all("th", scope="row")][:4] == [
            "loss < 1", nasty, f"loss <= 3 at 95 % for {nasty}", nasty
        ]  # fmt: skip
        cells = [text.strip() for _, text in found.all("td")]
        assert cells[0].endswith("✗ missed") and cells[1] == "2.000 [1.500, 2.500]" and cells[2].endswith("✓ met")
        assert not page.all("section", id="_gates")


class TestSummary:
    def rows(self, page) -> dict[str, list[str]]:
        (tables,) = [text for text in page.all("table", class_="summary")]
        headings, models = [group.heading for group in groups(reported.real())], len(reported.MODELS)
        assert models < len(headings)  # else they are in rows
        assert [text for _, text in page.all("th", scope="row", dir="auto")][: len(headings)] == headings
        assert [text for _, text in page.all("th", scope="col", dir="auto")][:models] == list(reported.MODELS)
        cells = [text.strip() for _, text in page.all("td", dir="auto")][: models * len(headings)]
        return {name: cells[at::models] for at, name in enumerate(reported.MODELS)}

    def test_an_unknown_kind_says_its_headline_without_the_model(self):
        heatmap = reported.heatmap([["a"]])
        other = dataclasses.replace(reported.entry("x", heatmap), heading="x")

        class Plain(Result, kind="plain-test"):
            headline = "Something of m: 3 things"
            to_frame = figure = None

        assert verdict(LabelledResult("m", other, Plain({"model": "m"})), "m") == "3 things"


@dataclasses.dataclass(frozen=True)
class Shown(Result, kind="shown-test"):
    """A result that is shown by every kind of block."""

    headline = "Something shown"

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"n": range(300)})

    def figure(self) -> Figure:
        return Figure(figsize=(1, 1))

    def blocks(self):
        yield Prose(self.headline, "title")
        yield Prose("A part & <more>", "heading")
        yield Prose("A note.", "note")
        yield Picture(self.figure, "drawn as lines")
        yield Picture(self.figure, "drawn as pixels", vector=False, folded=True)
        yield dataclasses.replace(frame_table(self.to_frame(), limit=200), brief=2, title="Numbers")
        yield frame_table(self.to_frame().head(5))
        own = dict(style=".ssmscope .own-view { --own: 1 }", script="document.title += '!'")
        yield Custom(html=lambda: '<b class="own-view">its own</b>', **own)
        yield Custom(html=lambda: "<i>one for every token</i>", on_request=True, **own)
        yield Custom(terminal=lambda colours: [])
        yield TokenMaps(html=lambda: '<script type="application/json">{}</script>', tokens=[("a",)], name="m")


class TestBlocks:
    """Blocks of a result, and their form on the page."""

    @pytest.fixture
    def made(self) -> str:
        return render(reported.report(reported.entry("shown", Shown({"model": "m"}), Shown({"model": "m"}))))

    def test_each_stands_as_it_asks(self, made):
        page = Page(made)
        assert [text for _, text in page.all("h4")] == ["A part & <more>"] * 2
        assert [text for _, text in page.all("p", class_="headline")] == ["Something shown"] * 2
        kinds = [(a["alt"], a["src"].partition(";")[0]) for a, _ in page.all("img", class_="figure")]
        assert kinds == [("drawn as lines", "data:image/svg+xml"), ("drawn as pixels", "data:image/png")] * 2
        article = page.all("article")[0][0]["id"]
        summaries = [(text, "open" in a) for (a, _), (_, text) in zip(page.all("details"), page.all("summary"))]
        own = [
            ("As a picture", False),
            ("Numbers: 100 rows", False),
            ("Table: 5 rows", True),
            ("Token by token", False),
        ]
        assert [each for each in summaries if each in own] == own * 2
        (request, _), *_ = page.all("details", class_="on-request")
        assert page.all("template")[0][1] == "one for every token" and not request.get("open")
        parts = [a["id"] for a, _ in page.all("div", class_="part")]
        assert len(set(parts)) == len(parts) and all(part.startswith(f"{article}--") for part in parts)

    def test_methods_are_seen_below_one_another(self, page):
        """The view to point at has one of them at a time."""
        every = reported.real().entries
        opened = [
            "open" in a for (a, _), (_, text) in zip(page.all("details"), page.all("summary")) if text == "As a picture"
        ]
        assert sum(opened) == sum(one.verb == "explain" and bool(one.results) for one in every) < len(opened)

    def test_styles_and_scripts_stand_once(self, made):
        assert made.count("--own: 1") == 1 and made.count("document.title +=") == 1

    def test_a_view_without_html_leaves_no_trace(self, made):
        assert len(Page(made).all("div", class_="part")) == 2 * 3

    def test_a_notebook_has_the_brief_tables(self):
        shown = Page(Shown({"model": "m"})._repr_html_())
        assert [len(text.split()) for _, text in shown.all("tbody")] == [2, 5]
        assert "2 of 300 rows." in [text for _, text in shown.all("p", class_="note")]
        assert [text for _, text in shown.all("script") if "title" in text] == ["document.title += '!'"]
        assert [text for _, text in shown.all("summary")][:2] == ["As a picture", "fields"]

    def test_rules_of_one_view_leave_others_alone(self):
        """Several views stand in one page: the rules of each are of elements within an element of its own."""
        blocks = [
            block for group in groups(reported.real()) for one in group.results() for block in one.result.blocks()
        ]
        for style in {block.style for block in blocks if isinstance(block, Custom)}:
            for rule in re.findall(r"[^{}]+(?=\{)", re.sub(r"@media[^{]+\{|/\*.*?\*/", "", style)):
                for selector in rule.split(","):
                    assert selector.strip().startswith(".ssmscope "), selector


class TestTexts:
    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.one_of(st.sampled_from(NASTY), st.text(min_size=1, max_size=12)), min_size=1, max_size=6))
    @example(["\n"])
    @example(["a\nb", "c"])
    def test_texts_stay_texts_wherever_they_stand(self, texts):
        a, b = texts[0], texts[-1]
        heatmap = reported.heatmap([texts], model=b, answer=a)
        entries = [
            reported.entry("heatmap", heatmap, heading=a, models=(b,), command=f"analyze {a}", options={a: b}),
            reported.failed("words", a, f"at {b}", models=(b,), heading=b + "x"),
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ssmscope.render.html.data_uri", lambda figure, **_: "data:,")
            found = Page(render(reported.report(*entries, title=a)))
            patch.setattr(type(heatmap), "figure", lambda self: None)
            clean = render(reported.report(*(plain(entry) for entry in entries), title="t"))
        assert [tag for tag, _, _ in found.elements] == [tag for tag, _, _ in Page(clean).elements]
        assert unsplit(found.all("title")[0][1]) == unsplit(found.all("h1")[0][1]) == unsplit(a)
        assert unsplit(f"analyze {a}") in [unsplit(text) for _, text in found.all("code")]
        assert unsplit(f"at {b}") in [unsplit(text) for _, text in found.all("pre")]
        assert any(unsplit(text).startswith(unsplit(a)) for _, text in found.all("h2"))
        (island,) = found.islands()
        assert island["model"] == b
        assert island["texts"][0]["answer"] == visible(a)
        assert island["texts"][0]["tokens"] == [token for _, token in spell_tokens(heatmap[0].tokens, heatmap[0].words)]

    def test_a_lone_surrogate_can_be_written(self):
        made = render(
            reported.report(reported.entry("heatmap", reported.heatmap([["a\ud800", "b"]]), models=("\udc00",)))
        )
        assert "\\udc00" in made and made.encode()

    def test_names_that_would_be_the_same_anchor(self):
        assert unique_names(["A b", "a  B", "", "share", "x" * 99, "a-b-2", "a_b", "שלום & co"]) == [
            "a-b",
            "a-b-2",
            "analysis",
            "analysis-2",
            "x" * 50,
            "a-b-2-2",
            "a-b-3",
            "שלום-co",
        ]
        entries = [reported.entry("v", heading=name) for name in ("Summary", "_summary", "summary heading", "a", "a 1")]
        found = Page(render(reported.report(*entries)))
        ids = [attributes["id"] for _, attributes, _ in found.elements if "id" in attributes]
        assert len(set(ids)) == len(ids)

    def test_long_texts_are_cut_and_counted(self):
        words = [f" word{i}" for i in range(12_000)]
        heatmap = reported.heatmap([words, ["x" * 50_000, " y"]])
        command = "analyze heatmap --text " + "w" * 50_000
        entry = reported.entry("heatmap", heatmap, command=command, options={"text": "v" * 50_000})
        made = reported.without_pictures(reported.report(entry))
        found = Page(made)
        first, second = found.islands()[0]["texts"]
        assert (len(first["tokens"]), first["length"]) == (report_page.MAX_TOKENS_PER_TEXT, 12_000)
        assert len(second["tokens"][0]) == report_page.MAX_TOKEN_CHARACTERS and second["tokens"][0][:5] == "xxxxx"
        assert command in [text for _, text in found.all("code")], "a command must re-make its item"
        assert "(50,000 characters)" in made and "v" * 301 not in made

    def test_right_to_left_texts_find_their_direction(self):
        entry = reported.entry("heatmap", reported.heatmap([["שלום"]]), heading="שלום", models=("عربي",))
        found = Page(render(reported.report(entry, title="שלום")))
        for tag in ("h1", "h3"):
            assert found.all(tag)[0][0]["dir"] == "auto"
        assert found.all("h2")[2][0]["dir"] == "auto"


def plain(entry):
    """The same entry with nothing in it that could be markup; values of several lines remain such."""
    heatmaps = [
        reported.heatmap([["t"] * len(result[0])], model=lines(result.provenance["model"]), answer="a")
        for result in entry.results
    ]
    options = {f"o{number}": lines(value) for number, value in enumerate(entry.options.values())}
    words = dict(heading=f"h {entry.verb}", models=("m",), command="c", options=options, results=tuple(heatmaps))
    failure = dict(error="e", traceback="t") if entry.error is not None else {}
    return dataclasses.replace(entry, **words, **failure)


def lines(text: object) -> str:
    """Return as many plain lines as a text has, which the page shows unchanged."""
    return "\n".join("x" * (1 + str(text).count("\n")))


def unsplit(text: str) -> str:
    """Return texts without the line breaks whose kinds HTML does not tell apart."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


class TestHeatmaps:
    def test_scores_come_back_exactly(self, page):
        results = [found.result for group in groups(reported.real()) for found in group.results()]
        results = [result for result in results if result.kind in ("heatmap", "explain")]
        islands = [island for island in page.islands() if island["variant"] != CHANGE]
        assert len(islands) == len(results) == 6
        for island, result in zip(islands, results):
            (block,) = [block for block in result.blocks() if isinstance(block, TokenRows)]
            assert island["rows"] == [row.name for row in block.texts[0].rows] and island["of"] == block.of
            if result.kind == "heatmap":
                assert island["rows"] == ["mean", *(f"layer {layer}" for layer in result.layers)]
            for shown, text, own in zip(island["texts"], block.texts, result, strict=True):
                rows = np.frombuffer(base64.b64decode(shown["scores"]), "<f4").reshape(len(text.rows), -1)
                wanted = [row.scores for row in text.rows]
                assert np.array_equal(rows, np.stack(wanted)) and shown["kept"] == [
                    list(row.marked) for row in text.rows
                ]
                if result.kind == "heatmap":
                    assert np.array_equal(rows, np.concatenate([own.mean[None], own.scores]))
                    for at, flat in enumerate(own.flat):
                        own_scores = rows[at, ~own.special].astype(np.float64)
                        found = (shown["low"][at], shown["high"][at])
                        assert found == (own_scores.min(), own_scores.max()) or flat and found[0] == found[1]
                    assert shown["kept"][0] == list(own.rationale)
                else:
                    assert np.array_equal(rows, np.stack([each.scores for each in own.attributions]))
                    assert shown["signed"] == [True, False] and shown["low"][0] == -shown["high"][0]
                assert shown["special"] == np.flatnonzero(own.special).tolist()
                pairs = spell_tokens(own.tokens, own.words)
                assert [(gap == "1", token) for gap, token in zip(shown["gaps"], shown["tokens"])] == pairs

    def test_models_and_variants_are_told_apart(self, page):
        told = [(island["model"], island["variant"]) for island in page.islands()]
        variants = [(model, score) for model in reported.MODELS for score in ("retention", "write")]
        assert told == [*variants, *((model, "score") for model in reported.MODELS), ("demo/sst2-mamba2", CHANGE)]

    def test_tokens_lead_to_the_attention_of_their_model_and_text(self, page):
        at = [
            place for place, (_, a, _) in enumerate(page.elements) if "ssmscope-attention" in a.get("class", "").split()
        ]
        parts = [page.elements[place - 1][1]["id"] for place in at]  # the part of the page that the maps are in
        assert len(set(parts)) == 2
        for island in (island for island in page.islands() if island["variant"] != CHANGE):
            own = parts[reported.MODELS.index(island["model"])]
            linked = [[(link["anchor"], link["text"]) for link in text["attention"]] for text in island["texts"]]
            assert linked == [[(own, 0)], [(own, 1)], [], []][: len(linked)]

    def test_another_model_of_the_same_name_is_no_link(self):
        entries = [entry for entry in reported.real().entries if entry.models == reported.MODELS[:1]]
        heatmap = next(entry for entry in entries if entry.verb == "heatmap")
        attention = next(entry for entry in entries if entry.verb == "attention")
        (result,) = attention.results
        other = dataclasses.replace(result, provenance={**result.provenance, "fingerprint": "another"})
        for found, links in ((result, [1, 1, 0, 0]), (other, [0, 0, 0, 0])):
            made = reported.without_pictures(reported.report(heatmap, dataclasses.replace(attention, results=(found,))))
            assert [len(text["attention"]) for text in Page(made).islands()[0]["texts"]] == links

    def test_a_range_is_that_of_the_whole_text(self):
        heatmap = reported.heatmap([["a"] * (report_page.MAX_TOKENS_PER_TEXT + 1)])
        text = heatmap[0]
        text.scores[0, -1] = 9.0
        (island,) = Page(reported.without_pictures(reported.report(reported.entry("heatmap", heatmap)))).islands()
        assert island["texts"][0]["high"][1] == 9.0

    def test_what_does_not_fit_is_counted(self, monkeypatch):
        monkeypatch.setattr(report_page, "MAX_BYTES", 1200)
        made = reported.without_pictures(reported.report(reported.entry("heatmap", reported.heatmap([["a"] * 10] * 5))))
        shown = len(Page(made).islands()[0]["texts"])
        assert 0 < shown < 5
        assert f"{5 - shown} texts are left out here" in made


@pytest.fixture(scope="module")
def entries():
    both = [ssmscope.load(name) for name in ("demo/babi-mamba2", "demo/babi-diff-mamba")]
    asked = dict(tasks=("qa1", "qa2"), examples=4)
    answered = ssmscope.retrieval(both, lengths=(0, 32), progress=False, **asked)
    read = ssmscope.snr(both, lengths=50, **asked)
    checked = ssmscope.checkpoints(reported.MODELS)
    return {
        name: reported.entry(name, result, models=("one", "two"))
        for name, result in (("retrieval", answered), ("snr", read), ("stability", checked))
    }
