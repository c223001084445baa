"""Everything that a terminal, a page and a paper show of hand-made blocks."""

import base64
import io
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from described import check, described, in_lines, printed, spread, tags
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.text import Text
from ssmscope.core.bootstrap import Estimate
from ssmscope.render import html, markup, token_rows, worddiff
from ssmscope.render.blocks import Block, Custom, Picture, Prose, TokenRow, TokenRows, TokenText
from ssmscope.render.colours import shade_style, signed_style
from ssmscope.render.table import Cell, Line, Table, frame_table, frames_table, number_cell, table
from ssmscope.render.terminal import grid, render
from ssmscope.render.token_maps import MappedText, TokenMap, _section, fragment, token_maps
from ssmscope.render.word_grid import WordGrid, WordGrids, shade

NAN = math.nan
PLAIN = Picture(Figure, "a <picture>")
CUSTOM = Custom(lambda colours: [Text(f"custom {colours}")], lambda: "<p>custom</p>", ".a {}", "run()")


def numbers() -> Table:
    lines = [
        Line(
            ("a & b", "[first]"),
            {"up": Cell(Estimate(1, 0, 2)), "x_1 | y": number_cell(3.0), "words": Cell(text="A *b*")},
        ),
        Line(("c\n", "second"), {"up": Cell(Estimate(4, 3.5, 5)), "words": Cell(text="< 5 % → “no”")}),
        Line(
            ("c\n", "third"), {"up": Cell(Estimate(NAN, NAN, NAN)), "x_1 | y": Cell(Estimate(-0.5, -1, 0), worst=True)}
        ),
    ]
    lines = [replace(line, peers=0) for line in (*lines, Line(("d", "in words"), {"up": Cell(text="none")}))]
    return replace(table(("model", "A_MoRF ↓"), lines, more=["up"], note="A note\nof two lines."), title="A title\t")


def in_terminal(blocks: Iterable[Block], width: int = 60, **options: Any) -> Iterator[str]:
    console = Console(**{"width": width, "height": 50, "color_system": "truecolor", "no_color": False, **options})
    yield printed(render(blocks, console), **{"width": width, **options})


def blocks_in_order() -> Iterator[str]:
    kinds = ("title", "text", "note", "note", "heading", "text")
    prose = [Prose(f"{kind} {at}\t", kind) for at, kind in enumerate(kinds)]  # type: ignore[arg-type]
    brief = replace(numbers(), brief=2)
    silent = Custom(html=lambda: "<p>silent</p>")
    every = [*prose, PLAIN, silent, Prose("after", "note"), brief, Prose("last", "note"), CUSTOM]
    folded = replace(PLAIN, folded=True)
    for options in ({}, {"color_system": "256"}, {"no_color": True}, {"color_system": "standard"}, {"width": 25}):
        yield from in_terminal(every, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "data_uri", lambda figure, vector: f"data:{type(figure).__name__}, {vector}")
        yield from tags(
            html.fragment([*every, folded, replace(folded, vector=False), CUSTOM, Custom(script="other()")])
        )
        yield from tags(
            html.fragment([numbers(), Prose("More on it.", "definition"), silent, Prose("Of all.", "definition")])
        )
        yield f"{html.styles_of([*every, *every])} {html.scripts_of([CUSTOM, Custom(script='other()'), CUSTOM])}"
        yield from tags(html.block_html(Prose("of level 4", "heading"), level=4))
    yield from tags(html.page("A <title>", "<p>body</p>", [("a & b", "c\nd"), ("e", "f")]))
    yield from tags(html.grid(numbers(), "a caption") + html.grid(replace(numbers(), title="")))


def tables() -> Iterator[str]:
    found = numbers()
    long = replace(found, heads=("model", "x" * 300), note="")
    yield markup.to_markdown(found) + markup.to_markdown(long)
    for plain in (False, True):
        yield markup.to_latex(found, plain=plain) + markup.to_latex(long, plain=plain)
    single = replace(found, heads=("model",), rows=tuple(((labels[0],), cells) for labels, cells in found.rows))
    yield markup.to_latex(single, plain=True)
    yield markup.for_latex("".join(markup.LATEX)) + markup.for_latex(" *a [b") + markup.for_latex("A_LeRF ↑")
    yield from in_lines(found.head(1))
    for shown in (found, replace(found, title="", note="", every=0)):
        yield (
            printed(grid(shown)) + printed(grid(shown, Console(width=50)), 50) + printed(grid(shown, Console(width=71)))
        )


def frames() -> Iterator[str]:
    frame = pd.DataFrame(
        {
            **{
                "model": ["m", "m", "m"],
                "name": ["a", "b\n", None],
                "loss": [0.5, NAN, 1e-9],
                "loss_low": [0.4, NAN, NAN],
            },
            **{"loss_high": [0.6, NAN, 2.0], "count": [30000, 4, 5], "right": [True, False, True], "none": [None] * 3},
            **{"value": [1.25, 2.5, 3.75], "low": [1.0, NAN, 3.5], "high": [1.5, 2.75, 4.0]},
            **{"whole": pd.array([1, None, 3], dtype="Int64"), "made": pd.array([True, None, False], dtype="boolean")},
        }
    )
    yield from in_lines(frame_table(frame))
    yield from in_lines(frame_table(frame, heads=["model", "name"], limit=2))
    yield from in_lines(frame_table(frame.iloc[:0]))
    yield from in_lines(frame_table(frame[["low", "high", "loss", "loss_low"]]))
    yield from in_lines(frame_table(frame[["high", "low", "value"]]))
    yield from in_lines(frames_table([frame, frame.assign(model=["x", "y", "z"])], ["first", "second"]))
    long = frames_table([pd.DataFrame({"x": range(150)}), pd.DataFrame({"x": range(30)})], ["first", "second"])
    yield " ".join(cell.value for _, (cell,) in long.rows)


WORDS = ("[CLS]", " A", " won", "der", "", " <film>", "\n", " ends")


def token_row(name: str, seed: int = 1, signed: bool = False, **more: Any) -> TokenRow:
    scores = spread(len(WORDS), low=-1.4 if signed else -0.2, high=1.4, seed=seed)
    return TokenRow(name, scores, (-1.0, 1.0) if signed else (0.0, 1.0), signed, **more)


def coloured_texts() -> Iterator[str]:
    outside = np.arange(len(WORDS)) == 0
    rows = (
        token_row("first\nof two", outside=outside, marked=(3, 2), own=(0.123, 0.9), remark="a <remark>", state=0.25),
        token_row("", 2, True, marked=(5,), against=(1, 7), query=6, state=-0.5, outside=outside),
        token_row("flat", 3, state=0.75, query=0, outside=np.arange(len(WORDS)) > 5),
    )
    rows = (*rows, replace(rows[0], name="level", ends=(0.5, 0.5), own=None), replace(rows[1], state=0.0, name="zero"))
    text = TokenText(WORDS, (None, 0, 1, 1, 1, 2, 3, 4), rows, "y\nes", 0.75, "about <it>", (2, 4))
    other = replace(text, rows=rows[:1], answer="no", probability=NAN, about="", span=None)
    block = TokenRows((text, other), "layer", "score", "a <name>", "some <words>", first=None)
    brief = replace(block, first=2, texts=(text, replace(other, rows=rows[1:])))
    image = replace(other, pixels=np.ones((2, 4, 1)))
    for each in (block, brief, replace(block, texts=(other, image)), replace(block, texts=(image,))):
        yield from in_terminal([each], width=90)
        yield from in_terminal([each], no_color=True)
        yield from tags(str(token_rows.html(each)))
    yield f"{[row.shades().tolist() for row in rows]} {[row.shades(count=5).tolist() for row in rows]}"
    yield f"{[row.extent for row in rows]} {rows[1].state_shade} {rows[2].state_shade} {text.special} {len(text)}"
    with pytest.MonkeyPatch.context() as patch:
        for name, most in (("MAX_TERMINAL_TEXTS", 1), ("MAX_PAGE_TEXTS", 1), ("MAX_PAGE_TOKENS", 7)):
            patch.setattr(token_rows, name, most)
        yield from in_terminal([block], width=90)
        yield from tags(str(token_rows.html(block)))
        patch.setattr(token_rows, "MAX_PAGE_TOKENS", 8)
        patch.setattr(token_rows, "MAX_COLOURED_TOKENS", 7)
        yield from in_terminal([block], width=90)
        yield from tags(str(token_rows.html(block)))


def colour_rules() -> Iterator[str]:
    yield shade_style() + signed_style()
    yield token_rows.style().removeprefix(shade_style() + signed_style())[:40]


def mapped(seed: int, maps: int, *, sink: bool, edges: np.ndarray | None = None, **more: Any) -> MappedText:
    keys = len(WORDS) if edges is None else len(edges) - 1
    queries = np.array([3, 7]) if edges is None else edges[1:] - 1
    seen = (np.arange(keys) if edges is None else edges[:-1]) <= queries[:, None]

    def one(number: int) -> TokenMap:
        values = spread(len(queries), keys, low=-2, high=3, seed=seed + number).astype(np.float32)
        values[0] *= number
        state = spread(len(queries), seed=seed).astype(np.float32) if sink else None
        strongest = [[(-1, 0.5), (1, -0.25)], *[[(2, 0.125 * row)] for row in range(1, len(queries))]]
        return TokenMap(f"map <{number}>", values, state, 1.5, 2.5, spread(len(queries), seed=9), strongest)

    text = TokenText(WORDS, (None, 0, 1, 1, 1, 2, 3, 4), (), "yes", 0.75, "about", **more)
    return MappedText(text, queries, edges, seen, maps, one)


def maps_of_texts() -> Iterator[str]:
    pixels = spread(2, 4, 3, seed=3)
    texts = [
        mapped(1, 2, sink=True, span=(2, 4)),
        mapped(2, 1, sink=False, edges=np.array([0, 3, 6, 8])),
        mapped(3, 1, sink=False, pixels=pixels),
        mapped(4, 0, sink=False),
    ]
    yield from tags(fragment(texts, "a <legend>"))
    rows = TokenRows((), "map", "weight", "n", "m")
    yield from described([replace(token_maps(texts[:1], rows, "level", "legend"), html=None)])
    with pytest.MonkeyPatch.context() as patch:
        room = int(texts[0].seen.sum() + texts[1].seen.sum())
        for weights in (room, room - 1, 2 * room):
            patch.setattr("ssmscope.render.token_maps.MAX_PAGE_WEIGHTS", weights)
            yield " ".join(part for part in tags(fragment(texts, "l")) if "note" in part or '"texts"' in part)
        patch.setattr("ssmscope.render.token_maps.MAX_PAGE_TOKENS", len(WORDS))
        yield f"{[each.fits for each in texts]}"
        yield f"{_section(0, texts[0], None)['rest']!r}"
        patch.setattr("ssmscope.render.token_maps.MAX_PAGE_TOKENS", len(WORDS) - 1)
        yield f"{[each.fits for each in texts]}"
        yield from tags(fragment(texts[:1], "l"))


def grid_of_words(seed: int, tokens: int = 5, layers: int = 3, label: str = "text 0") -> WordGrid:
    names = ("answer_probability", "entropy")
    scores = {name: spread(layers + 1, tokens, high=2, seed=seed + at) for at, name in enumerate(names)}
    scores["entropy"][1, 1] = NAN
    words = [
        [(" good", "b<a>d" * 9, "", "end\n", "  ")[(at + layer) % 5] for at in range(tokens)]
        for layer in range(layers + 1)
    ]
    same = spread(layers + 1, tokens, seed=seed) < 0.4
    named = [("[CLS]", " A", "", " wonderfulfilmsthatends" * 3, "\n")[at % 5] for at in range(tokens)]
    numbers = 3 + 2 * np.arange(tokens)
    return WordGrid(label, numbers, named, words, scores, same, np.arange(tokens) % (layers + 1))


def grids_of_words() -> Iterator[str]:
    names = {"answer_probability": "p of the answer", "entropy": "entropy, <nats>"}
    two = WordGrids((grid_of_words(1), grid_of_words(2, label="text 1")), "token", "a <lens>", names, "entropy")
    one = WordGrids((grid_of_words(3, 44, 12, ""),), "text", "lens", names, "answer_probability")
    many = replace(one, column="token")
    for each, width in ((two, 100), (one, 88), (many, 52), (many, 112), (one, 40)):
        yield printed([each], width) + f"\nhighest {each.highest}"
    yield from tags(two.html())
    yield from tags(replace(two, score="answer_probability").html())
    nothing = replace(
        two, grids=tuple(replace(each, scores={**each.scores, "entropy": np.full((4, 5), NAN)}) for each in two.grids)
    )
    zero = replace(
        two, grids=tuple(replace(each, scores={**each.scores, "entropy": np.zeros((4, 5))}) for each in two.grids)
    )
    yield f"{nothing.highest} {zero.highest} {two.layers}"
    yield f"{[shade(value, 2.0) for value in (-1, 0, 0.03, 1.0, 1.99, 3, NAN)]}"
    with pytest.MonkeyPatch.context() as patch:
        for cells in (8, 3):
            patch.setattr("ssmscope.render.word_grid.MAX_PAGE_CELLS", cells)
            yield from tags(two.html())
    block = two.block()
    yield f"{block.on_request} {block.style}"


def changes() -> Iterator[str]:
    for before, after in (
        ("A fine film,\nno?", "A dull film\nyes?"), ("don't stop <it>", "don’t stop (it) now"), ("same", "same"),
        ("", "new words"), ("old words", ""),
    ):  # fmt: skip
        yield f"{worddiff.word_diff(before, after)}"
        yield printed([worddiff.rich_diff(before, after)]) + worddiff.html_diff(before, after)


CASES: dict[str, Callable[[], Iterator[str]]] = {
    case.__name__.replace("_", "-"): case
    for case in (blocks_in_order, tables, frames, coloured_texts, colour_rules, maps_of_texts, grids_of_words, changes)
}


@pytest.mark.parametrize(("channels", "size"), [(1, (5, 2)), (2, (4, 1)), (3, (2, 5))])
def test_images_are_drawn_pixel_by_pixel(channels: int, size: tuple[int, int]) -> None:
    pixels = spread(*size, channels, low=-0.5, high=1.5, seed=2)
    (uri,) = (text["image"] for text in [_section(0, mapped(3, 1, sink=False, pixels=pixels), None)])
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition("base64,")[2]))).convert("RGBA"))
    assert (found[..., 3] == 255).all()
    shown = pixels if channels == 3 else pixels.mean(-1, keepdims=True)
    np.testing.assert_array_equal(
        found[..., :3], (np.broadcast_to(shown, (*size, 3)).clip(0, 1) * 255).astype(np.uint8)
    )


@pytest.mark.parametrize(
    ("size", "side"), [((1, 1), 16), ((18, 2), 16), ((2, 19), 15), ((43, 10), 6), ((2, 20), 15), ((60, 100), 4)]
)
def test_pixels_of_an_image_are_as_large_as_there_is_room(size: tuple[int, int], side: int) -> None:
    assert _section(0, mapped(3, 1, sink=False, pixels=np.ones((*size, 1))), None)["side"] == side


@pytest.mark.parametrize("name", CASES)
def test_what_is_shown(name: str) -> None:
    check(name, CASES[name]())


def test_pieces_of_a_change_join_to_both_texts() -> None:
    draw = np.random.default_rng(0)
    alphabet = list("ab  \n.'{}<&é—𝟕_-")
    for _ in range(300):
        before, after = ("".join(draw.choice(alphabet, draw.integers(0, 25))) for _ in range(2))
        pieces = worddiff.word_diff(before, after)
        assert "".join(p.text for p in pieces if p.kind != "added") == before
        assert "".join(p.text for p in pieces if p.kind != "removed") == after
        assert all(p.text for p in pieces) and {p.kind for p in pieces} <= {"same", "removed", "added"}
        assert all(a.kind != b.kind for a, b in zip(pieces, pieces[1:]))
    between = " so" * 300  # in long texts frequent words count too
    pieces = worddiff.word_diff(f"a{between} good film", f"the{between} bad film")
    assert [p.text for p in pieces if p.kind != "same"] == ["a", "the", "good", "bad"]
