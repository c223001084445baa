"""Numbers, tokens and names as they are written, at and around the values where their form changes."""

import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from described import check
from matplotlib import font_manager
from matplotlib.figure import Figure
from seen import luminance
from ssmscope.core.bootstrap import Estimate
from ssmscope.interp.heatmap.words import (
    Kind,
    format_half_life,
    is_punctuation,
    is_selective,
    median_half_life,
    standing_out,
    word_groups,
    word_scores,
    words_of,
)
from ssmscope.render import numbers, pictures, table
from ssmscope.render.colours import BLUES, BLUES_ON_DARK, CIVIDIS, SIGNED, SIGNED_ON_DARK, ink, ramp, signed_shades
from ssmscope.render.letters import drawable, families, letters, short_name
from ssmscope.render.tokens import name_scores, short_token, shorten, spell_tokens, unbroken, visible

NAN, INFINITE = math.nan, math.inf
VALUES = (0.0, -0.0, 0.5, -0.5, 1.0, -7.0, 0.0004, -0.0004, 0.05, 12.3456, 99.96, 1234.5, 999_999, 1e6, -1e6, 1e6 + 1)
TOKENS = (
    *("", " film", "  film", "film ", "fi  lm", " ", "  ", "\u200d", "\u200c\u200d", "a\u200db", "\u0301a", "\u0301"),
    *(" \u0301", "\u02ffa", "\u0300", "\n", "\r", "\t", "\x7f", "\x00", "\x1f", "\x80", "\u2028", "\u2029", "\u202e"),
    *("\ue000", "\ud800", "\u00a0", "\u3000", "a\u00a0b", "電影", "e\u0301", " \n ", "\u200b", " \u200d", "\u0e31x"),
)


def of_numbers() -> Iterator[str]:
    for value in (*VALUES, 1e-9, 2.0**-20, NAN, INFINITE, -INFINITE):
        written = [numbers.number(value, digits) for digits in (None, 0, 1, 3)]
        yield " | ".join(
            [repr(value), *written, numbers.number(value, significant=4), numbers.number(value, significant=2)]
        )
    for count in (0, 0.25, 3, 9.94, 9.96, 10, 10.04, 99.94, 100, 100.4, 999_999, 1e6, 2.46e9, 9.96e9, INFINITE, NAN):
        yield f"token_count({count}) = {numbers.token_count(count)}"
    for part, whole in ((0, 9), (9, 9), (1, 9), (4, 10_000), (5, 10_000), (1000, 10**7), (0, 0)):
        yield f"percent_of({part}, {whole}) = {numbers.percent_of(part, whole)}"
    for names, every in itertools.product(range(4), range(1, 8)):
        yield f"with_ties({names}, {every}) = {numbers.with_ties(['a', 'b', 'c'][:names], every)}"
    for low, high in ((0, 1), (0, 0.1), (0, 0.09), (0.5, 0.501), (-2, -1.9999), (0, 1e-7), (3, 3), (0, 1e5)):
        yield f"format_range({low}, {high}) = {numbers.format_range(low, high)}"
    for runs in ((), (3,), (3, 4), (0, 1, 2, 5), (1, 3, 4, 6), (2, 1, 0)):
        yield f"number_runs({runs}) = {numbers.number_runs(runs)}"
    for layers, most in itertools.product((1, 2, 5, 8, 48), (1, 2, 3, 4, 7, 9)):
        yield f"evenly_spaced({layers}, {most}) = {numbers.evenly_spaced(layers, most)}"
    yield f"{[numbers.counted(count, 'text') for count in (0, 1, 2, 1000, 12345)]}"
    yield f"{[numbers.format_probability(value) for value in (NAN, 0.0, 0.12345, 1.0)]}"
    scores, special = np.array([5.0, 0.25, -0.5, 9.0]), np.array([True, False, False, True])
    yield f"{numbers.score_range(scores, special)} {numbers.score_range(scores, special | True)}"


def of_estimates() -> Iterator[str]:
    ends = ((-0.5, 0.25), (0.0, 1.0), (NAN, NAN), (0.5, 0.5), (0.5, INFINITE), (-0.0004, 0.0006))
    for value, (low, high) in itertools.product((0.0, 0.009, 0.01, 0.456789, -0.0002, 1.0, NAN), ends):
        found = Estimate(value, low, high)
        written = (table.with_interval(found), table.in_percent(found), table.in_percent(found, sign=False))
        shown = (table.in_percent(found, interval=False), table.as_share(value), numbers.brackets(found, 2))
        cells = (
            table.value_cell(found), table.value_cell(found, 1), table.Cell(found, digits=None), table.Cell(found, "t"),
        )  # fmt: skip
        more = (table.number_cell(value), table.short_cell(value), table.short_cell(value, "word"))
        yield " | ".join((*written, *shown, *(f"{cell.value}{cell.interval}" for cell in (*cells, *more))))
    for shares in ((0.0099, 0.001), (0.0099, 0.01), (-0.01, 0.0), ()):
        yield f"{table.digits_of([Estimate(share, NAN, NAN) for share in shares])}"


def of_tokens() -> Iterator[str]:
    for token in TOKENS:
        written = [
            visible(token),
            short_token(token, 12),
            *(gap * "_" + text for gap, text in spell_tokens([token, token], [0, 1])),
        ]
        yield f"{token!a} {' | '.join(map(repr, written))}"
    for text, width in itertools.product(("abcdefgh", "abcdefghi"), (1, 2, 3, 4, 7, 8, 9)):
        yield f"shorten({text}, {width}) = {shorten(text, width)}"
    yield from (f"{width} {shorten('the old man, an old boat and a sea', width)}" for width in (11, 18, 33, 34))
    for text in ("20 % of p = 0.5 [−0.1, 0.2] in 3, 4 % x", f"a 0.1 · an old boat −2 · {'word ' * 6}· c", "q = r, 2 ]"):
        yield unbroken(text).replace("\u00a0", "_")
    for tokens, words in (
        ((" a", "b", " c"), (0, 0, 1)), (("a", "b", "", "c", "d"), (0, 0, 0, 1, None)), (("a", " ", "b"), (0, 1, 1)),
        ((" ", "b", "c"), (0, 1, 1)), (("a", "b", "c", "d"), (None, None, 0, 0)),
    ):  # fmt: skip
        yield f"{spell_tokens(tokens, words)}"
    yield name_scores(("a", " bcdef", "c"), np.array([1.0, -0.25, 3.14159]), (2, 1, 0), 4)


def of_colours() -> Iterator[str]:
    yield " ".join(ramp(("#102030", "#f0e0d0", "#808182"), 7)) + " " + " ".join(ramp(("#000000", "#ffffff"), 3))
    for grey in (0x00, 0x0A, 0x0B, 0x70, 0x75, 0x76, 0x77, 0xFF):
        yield " ".join(f"{colour} {ink(colour)}" for colour in (f"#{grey:02x}{grey:02x}{grey:02x}", f"#00{grey:02x}00"))
    yield " ".join(
        f"{colour} {ink(colour)}" for colour in ("#6464ed", "#0a68ff", "#096cfe", "#1275da", "#0570f0")
    )  # as bright as can be told


CASES: dict[str, Callable[[], Iterator[str]]] = {
    f"values-{case.__name__.replace('_', '-')}": case for case in (of_numbers, of_estimates, of_tokens, of_colours)
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_written(name: str) -> None:
    check(name, CASES[name]())


def slow_groups(words: list[int | None]) -> list[list[int]]:
    groups: list[list[int]] = []
    for at, word in enumerate(words):
        joins = at > 0 and word is not None and words[at - 1] == word
        groups = [*groups[:-1], [*groups[-1], at]] if joins else [*groups, [at]]
    return groups


@pytest.mark.parametrize("kind", ["share", "mean", "z"])
@pytest.mark.parametrize("punctuation", [False, True])
def test_words_that_stand_out(kind: Kind, punctuation: bool) -> None:
    random, seen = np.random.default_rng(1), set()
    for _ in range(80):
        size = int(random.integers(1, 30))
        words = [
            None if each < 0 else int(each)
            for each in np.cumsum(random.integers(0, 2, size)) - (random.random(size) < 0.1) * 99
        ]
        tokens = random.choice(["a", "b", ",", " ", "x!"], size).tolist()
        scores, top = random.integers(-2, 9, size) / 4, int(random.integers(0, 6))
        groups = [group for group in slow_groups(words) if words[group[0]] is not None]
        named = [punctuation or any(tokens[at] in ("a", "b", "x!") for at in group) for group in groups]
        values = [float(sum(scores[group]) if kind == "share" else np.mean(scores[group])) for group in groups]
        own = [value for value, name in zip(values, named) if name]
        limit = {
            "share": 1.5 * sum(values) / max(len(groups), 1),
            "mean": np.mean(own or [0]) + np.std(own or [0]),
            "z": 1.0,
        }
        high = [
            at for at, (value, name) in enumerate(zip(values, named)) if name and value > 0 and value >= limit[kind]
        ]
        high.sort(key=lambda at: (-values[at], at))
        expected = tuple(tuple(groups[at]) for at in high[: max(min(top, len(own) // 3), 1)])
        assert standing_out(words_of(tokens, words, punctuation=punctuation), scores, kind, top) == expected
        seen |= {len(expected)}
    assert seen >= {0, 1, 2}


def test_groups_of_tokens_and_their_scores() -> None:
    assert word_groups((None, None, 0, 0, 1, 0, None, 0)) == slow_groups([None, None, 0, 0, 1, 0, None, 0])
    scores = np.arange(12.0).reshape(2, 6) ** 2
    for groups in ([[0, 1], [2], [3, 4, 5]], [[1, 2, 3]], [[5], [0, 2]], [[at] for at in range(6)]):
        for summed in (True, False):
            expected = np.stack(
                [scores[:, group].sum(-1) if summed else scores[:, group].mean(-1) for group in groups], -1
            )
            np.testing.assert_allclose(word_scores(scores, groups, summed=summed), expected)
    assert word_scores(scores, [], summed=True) is scores
    assert [is_punctuation(word) for word in ("", ",", ",a", " ", "°", "—", "½", "$ 5")] == [
        True, True, False, True,
    ] + [*(False, True, False, False)]  # fmt: skip
    selective = ([-1.0, -2.0, -4.0], [0.0, 0.0], [], [1.0, 1.05], [-1.0, -1.3])
    assert [is_selective(np.array(own)) for own in selective] == [True, False, False, False, True]
    found = [
        median_half_life(np.array(lives))
        for lives in ([], [math.nan], [2.4], [1, 2.6, math.nan], [1, INFINITE, INFINITE], [1, 3, INFINITE])
    ]
    assert found == ["–", "–", "2", "2", "beyond the text", "3"]
    assert [format_half_life(life, 40) for life in (0.4, 12.6, INFINITE)] == ["0", "13", "> 40"]


def test_ink_reads_well_on_every_shade() -> None:
    shades = [*map(ramp, (BLUES, BLUES_ON_DARK, CIVIDIS)), *map(signed_shades, (SIGNED, SIGNED_ON_DARK))]
    for shade in itertools.chain(*shades):
        light, dark = sorted((luminance(shade), luminance(ink(shade))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_letters_have_widths_and_glyphs() -> None:
    assert [letters(text) for text in ("abc", "電影", "e\u0301", "\u200da", "ａ", "")] == [3, 4, 1, 1, 2, 0]
    assert families()[0] == "DejaVu Sans Mono" and families("DejaVu Sans")[0] == "DejaVu Sans"
    assert len({*families()}) == len(families()) and families("DejaVu Sans").count("DejaVu Sans") == 1

    def glyphs(family: str) -> set[int]:
        return set(font_manager.get_font(font_manager.findfont(family)).get_charmap())

    first, second = glyphs("DejaVu Sans Mono"), glyphs("DejaVu Sans")
    only = next(chr(code) for code in sorted(second - first) if unicodedata.category(chr(code))[0] == "L")
    assert drawable(f"a{only}\n") == f"a{only}\n"  # a fallback has it
    assert drawable("\U000e0100a\ufdd0") == "a□"  # without a width, and without a glyph
    assert short_name("x" * 28) == "x" * 28 and short_name("x" * 29) == "x" * 13 + "…" + "x" * 14
    assert short_name("a\tb", 2) == "…b"


@pytest.mark.usefixtures("painted")
def test_clipping_paths_are_numbered_and_large_pictures_are_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Figure((2, 1))
    for axes in figure.subplots(1, 2):
        axes.plot([0, 1], [0, 2])
    svg = pictures.encode_figure(figure, "svg")
    assert re.findall(rb'<clipPath id="(\w+)"', svg) == [b"p0", b"p1"] and b"url(#p1)" in svg and b"<text" not in svg
    assert re.search(rb"[0-9a-f]{10}\)", svg) is None
    for room, kind in ((len(svg), "svg+xml"), (len(svg) - 1, "png")):
        monkeypatch.setattr(pictures, "MAX_SVG_BYTES", room)
        assert pictures.data_uri(figure).startswith(f"data:image/{kind};base64,")
    assert pictures.data_uri(figure, vector=False).startswith("data:image/png;base64,")
