"""The served page in a browser, from typing a text to its answers, without contact to any other host. Needs playwright
and Debian's chromium."""

import html
import re
import socket

import pytest
from tabs import untroubled
from ssmscope.loading.load import load
from ssmscope.reports.live import Live, predictions
from ssmscope.reports.serving import EXAMPLE, start

sync = pytest.importorskip("playwright.sync_api", reason="install playwright to test the served page in a browser")
sync.expect.set_options(timeout=20_000)

TEXT = "A gripping film , beautifully acted ."
EDITED = "A boring film , beautifully acted ."
HOSTILE = "A <script>alert(1)</script> film \"'> <img src=x onerror=alert(1)> ${1+1} {{value}} ."


@pytest.fixture(scope="module")
def live():
    return Live([load("demo/sst2-mamba2"), load("demo/instruct-mamba2")], max_tokens=60)


@pytest.fixture(scope="module")
def url(live):
    application, address = start(live, port=free_port())
    yield address
    application.close()


@pytest.fixture(scope="module")
def tab(browser):
    """A page that is loaded anew for each test: a new one would be a process of its own, which takes longer."""
    page = browser.new_context(viewport={"width": 1400, "height": 1000}).new_page()
    page.set_default_timeout(20_000)
    return page


@pytest.fixture
def opened(tab, url):
    """`opened()` is the page; at the end nobody else may have been asked, and nothing complained."""

    def open_page():
        tab.mouse.move(0, 0)
        tab.goto(url)
        tokens(tab, 1).first.wait_for()  # of the text that the page opens with
        return tab

    with untroubled(tab, url, "data:", "blob:"):
        yield open_page


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def analyze(page, text: str, edited: str = "") -> None:
    page.locator("#ssmscope-text").fill(text)
    page.locator("#ssmscope-edited").fill(edited)
    page.locator("#ssmscope-analyze").click()
    page.locator("body:not(.working)").wait_for()  # Both models have answered: what is clicked now stays.


def tokens(page, number: int, side: str = "given"):
    return page.locator(f"#ssmscope-{side}-{number} p.tokens").first.locator("> span")


def choose(page, field: str, value: str) -> None:
    page.locator(f"#{field}").select_option(value)


def shown_like(piece: str) -> list[str]:
    """The tooltips of a heatmap's tokens."""
    flow = re.search(r'<p class="tokens">(.*?)</p>', piece)[1]
    return [html.unescape(title) for title in re.findall('title="(.*?)"', flow)]


def wait_for_heatmap(page, number: int, wanted: list[str], side: str = "given") -> None:
    """Wait until the tokens have these tooltips."""
    sync.expect(tokens(page, number, side)).to_have_count(len(wanted))
    for at, title in enumerate(wanted):
        sync.expect(tokens(page, number, side).nth(at)).to_have_attribute("title", title)


def told(piece: str) -> str:
    """The line above a row of attention: its map, its query and its scale."""
    (line,) = re.findall(r'<p class="row">(.*?)</p>', piece)
    return html.unescape(re.sub("<.*?>", "", line))


def test_both_models_answer(opened, live):
    page = opened()
    assert [name.split(" ")[0] for name in page.locator(".ssmscope-model").all_inner_texts()] == [
        "demo/sst2-mamba2",
        "demo/instruct-mamba2",
    ]
    analyze(page, TEXT)
    for number, model in enumerate(live.models):
        wait_for_heatmap(page, number, shown_like(live.answer(number, TEXT).given))
        frame = predictions(model, live.trace(number, TEXT))
        rows = page.locator(f"#ssmscope-prediction-{number} tr")
        sync.expect(rows).to_have_count(len(frame) + 1)
        for at, entry in enumerate(frame.itertuples(), start=1):
            name, p = rows.nth(at).locator("td").all_inner_texts()
            assert name.strip() == entry.name.strip() and float(p) == pytest.approx(entry.given, abs=5.01e-4)
    sync.expect(page.locator("#ssmscope-change-0")).to_be_hidden()


def test_opens_with_an_example_and_enter_asks(opened, live):
    page = opened()
    for number in (0, 1):
        wait_for_heatmap(page, number, shown_like(live.answer(number, EXAMPLE).given))
    field = page.locator("#ssmscope-text")
    assert field.input_value() == EXAMPLE
    field.fill("Dull")
    field.press("Shift+Enter")
    field.press_sequentially("film .")
    field.press("Enter")
    wait_for_heatmap(page, 0, shown_like(live.answer(0, "Dull\nfilm .").given))
    assert field.input_value() == "Dull\nfilm ."


def test_layer_and_score_are_switched(opened, live):
    page = opened()
    analyze(page, TEXT)
    wait_for_heatmap(page, 1, shown_like(live.answer(1, TEXT).given))
    page.locator("#ssmscope-heatmap-score").get_by_text("write", exact=True).click()
    for number in (0, 1):
        wait_for_heatmap(page, number, shown_like(live.heatmaps(number, TEXT, score="write", layer="mean")[0]))
    choose(page, "ssmscope-layer-1", "1")
    wait_for_heatmap(page, 1, shown_like(live.heatmaps(1, TEXT, score="write", layer="1")[0]))
    wait_for_heatmap(page, 0, shown_like(live.heatmaps(0, TEXT, score="write", layer="mean")[0]))


def test_a_clicked_token_shows_its_row(opened, live):
    page = opened()
    analyze(page, TEXT)
    wait_for_heatmap(page, 1, shown_like(live.answer(1, TEXT).given))
    tokens(page, 0).nth(4).click()
    row, field = (page.locator("#ssmscope-given-0-row .row"), page.locator("#ssmscope-given-0-token"))
    sync.expect(row).to_have_text(told(live.row(0, TEXT, "4", layer=0, level="block")))
    sync.expect(field).to_have_value("4")
    page.locator("#ssmscope-attention-level").get_by_text("ssm", exact=True).click()
    sync.expect(row).to_have_text(told(live.row(0, TEXT, "4", layer=0, level="ssm")))
    choose(page, "ssmscope-attention-0", "1")
    sync.expect(row).to_have_text(told(live.row(0, TEXT, "4", layer=1, level="ssm")))
    tokens(page, 0).nth(2).click()
    sync.expect(row).to_have_text(told(live.row(0, TEXT, "2", layer=1, level="ssm")))
    field.fill("99")
    sync.expect(page.locator("#ssmscope-given-0-row .refusal")).to_have_text(
        f"there is no token '99'; the text has the tokens 0 to {tokens(page, 0).count() - 1}"
    )
    sync.expect(page.locator("#ssmscope-given-1-row")).to_contain_text("Click a token")


def test_what_is_typed_is_not_yet_asked(opened, live):
    page = opened()
    analyze(page, TEXT)
    wait_for_heatmap(page, 1, shown_like(live.answer(1, TEXT).given))
    page.locator("#ssmscope-text").fill("Dull .")
    tokens(page, 0).nth(4).click()
    wanted = told(live.row(0, TEXT, "4", layer=0, level="block"))
    sync.expect(page.locator("#ssmscope-given-0-row .row")).to_have_text(wanted)
    page.locator("#ssmscope-analyze").click()
    wait_for_heatmap(page, 0, shown_like(live.answer(0, "Dull .").given))
    sync.expect(page.locator("#ssmscope-given-0-row")).to_contain_text("Click a token")


def test_an_edited_text_is_compared(opened, live):
    page = opened()
    analyze(page, TEXT, EDITED)
    for number in (0, 1):
        change = page.locator(f"#ssmscope-change-{number}")
        sync.expect(change.locator("del")).to_have_text("gripping")
        sync.expect(change.locator("ins")).to_have_text("boring")
        wait_for_heatmap(page, number, shown_like(live.answer(number, TEXT, EDITED).edited), "edited")
        assert page.locator(f"#ssmscope-prediction-{number} th").all_inner_texts()[-1] == "change"
    tokens(page, 1, "edited").nth(1).click()
    wanted = told(live.row(1, EDITED, "1", layer=0, level="block"))
    sync.expect(page.locator("#ssmscope-edited-1-row .row")).to_have_text(wanted)
    sync.expect(page.locator("#ssmscope-given-1-row")).to_contain_text("Click a token")
    analyze(page, TEXT)
    sync.expect(page.locator("#ssmscope-change-0")).to_be_hidden()
    sync.expect(page.locator("#ssmscope-edited-1")).to_be_hidden()


def test_markup_stays_a_text(opened):
    page = opened()
    analyze(page, HOSTILE, HOSTILE.replace("film", "play"))
    page.locator("#ssmscope-change-1 del").wait_for()
    tokens(page, 0).nth(3).click()
    page.locator("#ssmscope-given-0-row .row").wait_for()
    for number in (0, 1):
        flow = "".join(tokens(page, number).all_inner_texts()).replace(" ", "").replace("␣", "")
        for piece in ("<script>alert(1)</script>", "<imgsrc=xonerror=alert(1)>", "${1+1}", "{{value}}"):
            assert piece in flow
    assert not page.locator("main script, main img[src=x]").count()


@pytest.mark.parametrize(("text", "line"), [(" ", "the text is empty"), ("film " * 60, "the text has 61 tokens, more")])
def test_a_refusal_is_one_line_and_takes_the_last_answer_away(opened, text, line):
    page = opened()
    analyze(page, TEXT)
    tokens(page, 1).nth(1).wait_for()
    analyze(page, text)
    refusal = page.locator("#ssmscope-prediction-0 .refusal")
    sync.expect(refusal).to_contain_text(line)
    sync.expect(tokens(page, 0)).to_have_count(0)
    assert "\n" not in refusal.inner_text() and "Traceback" not in page.locator("body").inner_text()
