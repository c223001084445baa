"""Figures as wide as a page's text: no text is cut off by the picture's edge, and none overlaps another; pages on
paper: whole tables, and tokens in their colours."""

from pathlib import Path

import pytest
from drawn import TEXT_WIDTH, assert_fits
from ssmscope.api.results import Result
from ssmscope.render.figure import Frame, Sheet, framed

RECORDED = Path(__file__).resolve().parents[1] / "recorded"
FILE_BY_KIND = {file.stem: file for file in sorted(RECORDED.glob("*/*.json"))}


@pytest.mark.parametrize("kind", FILE_BY_KIND)
def test_every_recorded_kind_fits(kind: str) -> None:
    assert_fits(Result.load(FILE_BY_KIND[kind]), TEXT_WIDTH)


@pytest.mark.parametrize("file", sorted(RECORDED.glob("*/*.json")), ids=lambda file: file.parent.name)
def test_a_title_is_the_whole_finding(file: Path) -> None:
    headline = Result.load(file).headline
    with framed(Frame()) as frame:
        title, *_ = Sheet(frame, headline).figure.texts
    assert " ".join(title.get_text().split()) == " ".join(headline.split())


@pytest.fixture(scope="module")
def paper(browser):
    """Function that opens an HTML page as it is printed, 17 cm wide, or at another width."""
    page = browser.new_page()

    def opened(html: str, width: int = 643, media: str = "print"):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(media=media)
        page.set_content(html)
        return page

    return opened


def test_printed_tables_are_whole(paper) -> None:
    """No number is beyond the paper's edge, where nobody can scroll, and none is broken."""
    page = paper(Result.load(FILE_BY_KIND["fidelity"]).to_html())
    wide = "[...document.querySelectorAll('.wide')].map(e => [e.scrollWidth, e.clientWidth])"
    assert (found := page.evaluate(wide)) and all(inner <= outer for inner, outer in found)
    lines = "[...document.querySelectorAll('td.number small')].map(e => e.getClientRects().length)"
    assert set(page.evaluate(lines)) == {1}


def test_names_of_rows_are_one_line_on_a_phone(paper) -> None:
    page = paper(Result.load(RECORDED / "ablate-head" / "ablate.json").to_html(), 420, media="screen")
    lines = "[...document.querySelectorAll('.wide tbody th')].map(e => e.getClientRects()[0].height)"
    assert (heights := page.evaluate(lines)) and max(heights) < 40
    assert page.evaluate("document.documentElement.scrollWidth") == 420


def test_printed_tokens_keep_their_colours(paper) -> None:
    """Browsers leave backgrounds out on paper unless a page asks for them: light letters would be on white."""
    page = paper(Result.load(FILE_BY_KIND["heatmap"]).to_html())
    kept = "[...document.querySelectorAll('.tokens span')].map(e => getComputedStyle(e).printColorAdjust)"
    assert set(page.evaluate(kept)) == {"exact"}
