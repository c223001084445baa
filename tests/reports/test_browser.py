"""The page of a report in a browser: the effects of pointing, choosing and keys, with nothing fetched and no errors.
Needs playwright and Debian's chromium."""

from contextlib import ExitStack, closing
from dataclasses import dataclass

import pandas as pd
import pytest
import reported
from tabs import untroubled
from ssmscope.api.results import Result
from ssmscope.render.blocks import Custom, TokenRows


@dataclass(frozen=True)
class Asked(Result, kind="asked-for-test"):
    """A result with a view that a page has only when it is asked for."""

    figure = None

    def to_frame(self):
        return pd.DataFrame({"n": [1]})

    def blocks(self):
        yield Custom(html=lambda: '<section class="asked-for">every token</section>', on_request=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    many = reported.heatmap([[f" word{i}" for i in range(100)]] * 200, layers=4)
    texts = [["שלום", " עולם", " טוב"], ["<b>", " &amp;", " 👩‍👩‍👧"], ["x"] * 1600]
    odd = [
        reported.entry("heatmap", reported.heatmap(texts, model=name, seed=seed), models=(name,), heading="odd")
        for seed, name in enumerate(("<i>one", "two"))
    ]
    pages = {
        "many": reported.report(reported.entry("heatmap", many)),
        "odd": reported.report(*odd, title="<u>odd</u>"),
        "asked": reported.report(reported.entry("asked", Asked({"model": "m"}))),
    }
    made = {"real": reported.rendered()}
    made |= {name: reported.without_pictures(report) for name, report in pages.items()}
    for name, page in made.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tab(browser):
    """A page that is loaded anew for each test: a new one would be a process of its own, which takes longer."""
    return browser.new_context().new_page()


@pytest.fixture
def opened(browser, tab, files):
    """`opened("real")` is that page; at the end nothing may have been fetched, and nothing complained."""
    with ExitStack() as around:

        def open_page(name: str, **options):
            page = around.enter_context(closing(browser.new_context(**options))).new_page() if options else tab
            url = (files / f"{name}.html").as_uri()
            around.enter_context(untroubled(page, url, "data:"))
            page.set_default_timeout(10_000)
            page.mouse.move(0, 0)
            page.goto(url)
            return page

        yield open_page
        tab.emulate_media(media="null")


def choose(page, label: str, value: str) -> None:
    heat(page).locator(".controls label").filter(has_text=label).first.locator("select").select_option(label=value)


def heat(page):
    """The first analysis whose tokens are pointed at."""
    return page.locator(".heat").first


def first_heatmap(score: str = "retention", model: int = 0):
    entries = [one for one in reported.real().entries if one.verb == "heatmap"]
    return [
        one.results[0] for one in entries if one.models == (reported.MODELS[model],) and one.options["score"] == score
    ][0]


class TestHeatmap:
    def test_pointing_at_a_token_shows_its_scores(self, opened):
        page = opened("real")
        heatmap = first_heatmap()
        text = heatmap[0]
        heat(page).locator(".tokens span").nth(2).hover()
        assert heat(page).locator(".block > .told").inner_text().startswith("“,” position 2")
        shown = heat(page).locator(".strip li").all_inner_texts()
        rows = [text.mean[2], *text.scores[:, 2]]
        names = ["mean", *(f"layer {layer}" for layer in heatmap.layers)]
        assert len(shown) == len(rows)
        for line, name, value in zip(shown, names, rows):
            found, number = line.rsplit("\n", 1)
            assert found.strip() == name and float(number) == pytest.approx(float(value), rel=1e-5)

    def test_colours_are_those_of_the_range_and_the_numbers_readable(self, opened):
        for scheme in ("light", "dark"):
            page = opened("real", color_scheme=scheme)
            (block,) = [one for one in first_heatmap().blocks() if isinstance(one, TokenRows)]
            row = block.texts[0].rows[0]
            spans = heat(page).locator(".block > .tokens span")
            ends = [int(row.scores[: len(row.scores) - 1].argmin()), int(row.scores[: len(row.scores) - 1].argmax())]
            for at, shade in enumerate(row.shades().tolist()):
                names = spans.nth(at).get_attribute("class").split()
                assert f"v{shade}" in names if shade >= 0 else "special" in names
            for at in ends:
                ink, paper = spans.nth(at).evaluate(
                    "e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]"
                )
                assert contrast(ink, paper) >= 4.5

    def test_choosing_a_layer_a_score_and_a_model(self, opened):
        page = opened("real")
        answer = heat(page).locator(".block .answer").first
        for model, name in enumerate(reported.MODELS):
            choose(page, "model", name)
            for score in ("write", "retention"):
                choose(page, "score", score)
                for row, layer in enumerate(("mean", "layer 0", "layer 1")):
                    choose(page, "layer", layer)
                    text = first_heatmap(score, model)[0]
                    values = [text.mean, *text.scores][row]
                    heat(page).locator(".tokens span").nth(1).hover()
                    said = heat(page).locator(".block > .told").inner_text()
                    assert float(said.rsplit(" ", 1)[1]) == pytest.approx(float(values[1]), rel=1e-5)
                    assert name in answer.inner_text() and f"· {score} ·" in answer.inner_text()

    def test_texts_by_name_and_by_turning(self, opened):
        page = opened("real")
        choose(page, "text", "1. Dull & overlong ; the plot < b > never < / b > starts .")
        assert heat(page).locator(".block > .tokens span").first.inner_text() == "Dull"
        heat(page).get_by_role("button", name="next text").click()
        assert heat(page).locator(".block > .tokens span").first.inner_text() == "It"
        heat(page).get_by_role("button", name="previous text").click()
        heat(page).get_by_role("button", name="previous text").click()
        assert heat(page).locator(".block > .tokens span").first.inner_text() == "A"
        assert heat(page).get_by_role("button", name="previous text").is_disabled()

    def test_two_beside_one_another(self, opened):
        page = opened("real")
        choose(page, "compare with", f"{reported.MODELS[1]} · write")
        assert heat(page).locator(".block").count() == 2
        assert f"{reported.MODELS[1]} · write" in heat(page).locator(".block").nth(1).inner_text()
        choose(page, "compare with", "nothing")
        assert heat(page).locator(".block").count() == 1

    def test_a_click_shows_what_a_token_attends_to(self, opened):
        page = opened("real")
        heat(page).locator(".tokens span").nth(3).click()
        attended = heat(page).locator(".attended")
        (attention,) = [one.results[0] for one in reported.real().entries if one.verb == "attention"][:1]
        layers = [attention.map(0, layer=layer)[3] for layer in (0, 1)]
        for index, row in enumerate([sum(map(abs, layers)) / 2, *layers]):  # it opens on the mean |weight|
            attended.locator("select").select_option(index=index) if index else None
            titles = [attended.locator(".tokens span").nth(at).get_attribute("title") for at in range(4)]
            found = [float(title.split(": ")[1].replace("−", "-")) for title in titles]
            assert found == pytest.approx(row[:4].tolist(), abs=float(abs(row).max()) / 127)
            assert attended.locator(".tokens span").nth(4).get_attribute("title") is None
            strongest = attended.locator(".told").inner_text().removeprefix("strongest: ").split(", “")[0]
            assert float(strongest.rsplit(" ", 1)[1].replace("−", "-")) == pytest.approx(
                row[abs(row).argmax()], rel=5e-3
            )
        heat(page).locator(".block > .tokens span").nth(3).click()
        assert attended.is_hidden()

    def test_a_text_without_attention_says_so(self, opened):
        page = opened("real")
        choose(page, "text", "3. A waste of a fine cast .")
        heat(page).locator(".block > .tokens span").nth(1).click()
        assert "no attention maps" in heat(page).locator(".attended").inner_text()

    def test_by_keys_alone(self, opened):
        page = opened("real")
        tokens = heat(page).locator(".block > .tokens span")
        assert tokens.evaluate_all("all => all.filter((one) => one.tabIndex === 0).length") == 1
        heat(page).locator(".controls label").filter(has_text="layer").locator("select").focus()
        page.keyboard.press("Tab")
        focused = "document.activeElement.dataset.i"
        start = int(page.evaluate(focused))
        page.keyboard.press("ArrowRight")
        assert int(page.evaluate(focused)) == start + 1
        assert f"position {start + 1} " in heat(page).locator(".block > .told").inner_text() + " "
        page.keyboard.press("Home")
        page.keyboard.press("ArrowLeft")
        assert page.evaluate(focused) == "0"
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        assert heat(page).locator(".attended").is_visible()
        assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
        page.keyboard.press("Escape")
        assert heat(page).locator(".attended").is_hidden()
        page.keyboard.press("End")
        assert int(page.evaluate(focused)) == tokens.count() - 1


class TestTexts:
    def test_markup_is_text_and_long_texts_are_cut(self, opened):
        page = opened("odd")
        assert page.locator("h1").inner_text() == "<u>odd</u>" and not page.locator("h1 u").count()
        choose(page, "text", "1. <b> &amp; 👩‍👩‍👧")
        assert page.locator(".block > .tokens span").all_inner_texts() == ["<b>", "&amp;", "👩‍👩‍👧"]
        assert page.locator(".block .answer b").first.inner_text() == "<i>one"
        page.get_by_role("button", name="next text").click()
        assert page.locator(".block > .tokens span").count() == 1500
        assert "the first 1,500 of 1,600 tokens" in page.locator(".block").inner_text()
        choose(page, "model", "two")
        assert page.locator(".block .answer b").first.inner_text() == "two"

    def test_right_to_left_texts_and_their_arrows(self, opened):
        page = opened("odd")
        tokens = page.locator(".block > .tokens")
        assert tokens.evaluate("e => getComputedStyle(e).direction") == "rtl"
        left = [tokens.locator("span").nth(at).bounding_box()["x"] for at in range(3)]
        assert left[0] > left[1] > left[2]
        tokens.locator("span").first.focus()
        page.keyboard.press("ArrowLeft")
        assert page.evaluate("document.activeElement.dataset.i") == "1"


class TestPage:
    def test_many_texts_are_built_when_they_are_shown(self, opened):
        page = opened("many")
        assert page.evaluate("document.querySelectorAll('.heat .tokens span').length") == 100
        assert page.evaluate("document.querySelectorAll('*').length") < 3000
        page.locator(".heat .controls label").filter(has_text="text").locator("select").select_option("199")
        assert page.evaluate("document.querySelectorAll('.heat .tokens span').length") == 100
        assert page.get_by_role("button", name="next text").is_disabled()

    def test_a_command_is_copied_or_selected(self, opened):
        for allowed in (True, False):
            page = opened("real", permissions=["clipboard-read", "clipboard-write"] if allowed else [])
            if not allowed:
                page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('not here')); }")
            command = page.locator(".command").first
            command.get_by_role("button").click()
            command.locator(".copied:not(:empty)").wait_for()
            wanted = reported.real().entries[0].command
            assert command.locator(".copied").inner_text() == ("copied" if allowed else "selected")
            taken = "navigator.clipboard.readText()" if allowed else "getSelection().toString()"
            assert page.evaluate(taken) == wanted

    def test_explanations_are_pointed_at_like_heatmaps(self, opened):
        page = opened("real")
        own = page.locator(".heat").nth(1)
        entries = [one for one in reported.real().entries if one.verb == "explain"]
        text = entries[0].results[0][0]
        tokens = own.locator(".block > .tokens span")
        end = max(abs(text.attributions[0].scores[~text.special]))
        for at, score in enumerate(text.attributions[0].scores.tolist()):
            level = max(-16, min(16, score / end * 16))
            assert abs(int(tokens.nth(at).get_attribute("data-l")) - level) <= 0.51
        own.locator(".controls label").filter(has_text="method").locator("select").select_option(label="self-retention")
        assert tokens.first.get_attribute("data-l") is None and "v" in tokens.first.get_attribute("class")
        tokens.first.hover()
        shown = own.locator(".strip li").all_inner_texts()
        assert [line.split("\n")[0].strip() for line in shown] == ["ig", "self-retention"]

    def test_views_of_many_tokens_come_when_they_are_asked_for(self, opened):
        page = opened("asked")
        assert not page.locator(".asked-for").count()
        page.locator("details.on-request").first.locator("summary").click()
        page.locator("details.on-request .asked-for").first.wait_for()
        assert not page.locator("details.on-request").first.locator("template").count()

    def test_attention_maps_of_the_page_live(self, opened):
        page = opened("real")
        first = page.locator(".ssmscope-attention").first
        first.locator(".tokens [data-i='2']").first.hover()
        assert first.locator(".told").first.inner_text().startswith("query 2 ")

    def test_paper(self, opened):
        page = opened("real")
        closed = "document.querySelectorAll('details:not([open])').length"
        before = page.evaluate(closed)
        assert before > 0
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate(closed) == 0 and not page.locator("template").count()
        page.emulate_media(media="print")
        for what in (".heat .controls", "button.copy", "nav"):
            assert page.locator(what).first.is_hidden()
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate(closed) == before

    def test_a_narrow_screen_scrolls_one_way(self, opened):
        for name in ("real", "odd"):
            page = opened(name, viewport={"width": 400, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= 400

    def test_without_scripts(self, opened):
        page = opened("real", java_script_enabled=False)
        assert page.locator(".heat noscript").first.is_visible() and page.locator("button.copy").first.is_hidden()
        assert page.locator("img.figure").count() > 4


def contrast(ink: str, paper: str) -> float:
    """WCAG's contrast of two colours, "rgb(1, 2, 3)"."""
    lights = []
    for colour in (ink, paper):
        parts = [int(part) / 255 for part in colour[4:-1].split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        lights.append(sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear)))
    return (max(lights) + 0.05) / (min(lights) + 0.05)
