"""The page of a report in its parts: its contents, texts that stay texts, and the data of its scripts."""

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
import reported
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from ssmscope.api.scores import Score
from ssmscope.render.blocks import Custom
from ssmscope.render.tokens import spell_tokens, visible
from ssmscope.reports import page as report_page
from ssmscope.reports.gates import decide
from ssmscope.reports.grouping import groups, unique_names
from ssmscope.reports.page import render
from ssmscope.reports.requirements import read_requirement

VOID = {"meta", "link", "img", "input", "br", "wbr", "hr"}
NASTY = (
    "<script>alert(1)</script>", "</script><b>", '" onmouseover="alert(1)', "' \" & &amp; &lt;", "<!-- not a comment",
    "{{ 7 * 7 }} {% raw %}", "שלום עולם", "مرحبا", "👩‍👩‍👧 emoji 🎉", "]]> \\u003c",
)  # fmt: skip

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


html = pytest.fixture(scope="module")(lambda: reported.rendered())
page = pytest.fixture(scope="module")(lambda html: Page(html))


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


class TestBlocks:
    """Blocks of a result, and their form on the page."""

    def test_methods_are_seen_below_one_another(self, page):
        """The view to point at has one of them at a time."""
        every = reported.real().entries
        opened = [
            "open" in a for (a, _), (_, text) in zip(page.all("details"), page.all("summary")) if text == "As a picture"
        ]
        assert sum(opened) == sum(one.verb == "explain" and bool(one.results) for one in every) < len(opened)

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
            patch.setattr(type(heatmap), "figure", lambda self: Figure())
            clean = render(reported.report(*(plain(entry) for entry in entries), title="t"))
        assert [tag for tag, _, _ in found.elements] == [tag for tag, _, _ in Page(clean).elements]
        assert unsplit(found.all("title")[0][1]) == unsplit(found.all("h1")[0][1]) == unsplit(a)
        assert unsplit(f"analyze {a}") in [unsplit(text) for _, text in found.all("code")]
        assert unsplit(f"at {b}") in [unsplit(text) for _, text in found.all("pre")]
        assert any(unsplit(text).startswith(unsplit(a)) for _, text in found.all("h2"))
        (island,) = found.islands()
        assert island["model"] == b and island["texts"][0]["answer"] == visible(a)
        assert island["texts"][0]["tokens"] == [token for _, token in spell_tokens(heatmap[0].tokens, heatmap[0].words)]

    def test_a_lone_surrogate_can_be_written(self):
        made = render(
            reported.report(reported.entry("heatmap", reported.heatmap([["a\ud800", "b"]]), models=("\udc00",)))
        )
        assert "\\udc00" in made and made.encode()

    def test_names_that_would_be_the_same_anchor(self):
        assert unique_names(["A b", "a  B", "", "%", "x" * 99, "a-b-2", "a_b", "שלום & co"]) == [
            "a-b", "a-b-2", "analysis", "analysis-2", "x" * 50, "a-b-2-2", "a-b-3", "שלום-co",
        ]  # fmt: skip
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
