"""Notebook widget of coloured tokens: layers, heads and tokens are chosen in the browser, and Python knows which.

Scores are sent once, as float32, and maps as pages have them; nothing is asked of the kernel. Colours and scales are
those of the pages. Where widgets cannot be shown, the result's page is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import anywidget
import numpy as np
import traitlets
from markupsafe import Markup
from ssmscope.errors import InputError
from ssmscope.render import token_rows
from ssmscope.render.blocks import Block, TokenMaps, TokenRows, TokenText
from ssmscope.render.colours import SHADES, STEPS, template_text
from ssmscope.render.html import stylesheet
from ssmscope.render.tokens import spell_tokens, visible


class TokenWidget(anywidget.AnyWidget):
    """Texts whose tokens have the colours of one layer, or method, and head at a time.

    Attributes:
        text: number of the shown text.
        layer, head: names of the chosen layer or method, and of the head, "" for the whole layer.
        tokens: positions of the selected tokens; of a map the query, or the tokens of its cell.
        names: (layer, head) of every row or map, for each text.
        scores: float32 scores of every row (rows, tokens) in bytes, for each text; [] for maps.
    """

    _esm = f"{template_text('token_maps.js')}\n{template_text('widget.js')}"
    _css = stylesheet() + token_rows.style() + template_text("token_maps.css") + template_text("widget.css")

    html = traitlets.Unicode().tag(sync=True)
    rows: traitlets.List[Any] = traitlets.List().tag(sync=True)
    scores: traitlets.List[Any] = traitlets.List().tag(sync=True)
    scale = traitlets.Dict({"shades": SHADES, "steps": STEPS}).tag(sync=True)
    kind = traitlets.Unicode("layer").tag(sync=True)
    text = traitlets.Int(0).tag(sync=True)
    layer = traitlets.Unicode().tag(sync=True)
    head = traitlets.Unicode().tag(sync=True)
    tokens = traitlets.List(traitlets.Int()).tag(sync=True)
    page: Callable[[], str]

    @property
    def names(self) -> list[list[tuple[str, str]]]:
        return [[(row["layer"], row["head"]) for row in rows] for rows in self.rows]

    @traitlets.validate("layer", "head")
    def _check_name(self, proposal: dict[str, Any]) -> str:
        name, given = proposal["trait"].name, proposal["value"]
        allowed = list(dict.fromkeys(row[name] for rows in self.rows for row in rows))
        if given not in allowed:
            raise InputError(f"there is no {name} {given!r}; allowed are {', '.join(map(repr, allowed))}")
        return str(given)

    @traitlets.validate("text", "tokens")
    def _check_number(self, proposal: dict[str, Any]) -> Any:
        name, given = proposal["trait"].name, proposal["value"]
        lengths = [row["length"] for row in self.rows[self.text]] if name == "tokens" else [len(self.rows)]
        most = max(lengths, default=0) - 1
        if not all(0 <= at <= most for at in np.atleast_1d(given)):
            raise InputError(f"{name}={given!r}: allowed are 0 to {most}")
        return given

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Return the widget's view, and the result's page for what cannot show widgets."""
        found = super()._repr_mimebundle_(**options)
        data, metadata = found if isinstance(found, tuple) else (found or {}, {})
        return {**data, "text/html": self.page()}, metadata


def token_widget(blocks: Iterable[Block], page: Callable[[], str]) -> TokenWidget:
    """Return the widget of the first maps, or else of the first coloured rows, among a result's blocks.

    Raises:
        InputError: there are none, or they are of images.
    """
    shown = [block for block in blocks if isinstance(block, TokenMaps | TokenRows)]
    block = next((each for each in shown if isinstance(each, TokenMaps)), next(iter(shown), None))
    made: dict[str, Any]
    if isinstance(block, TokenMaps):
        fragment = block.html() if block.html is not None else ""
        data = json.loads(fragment.partition('type="application/json">')[2].partition("</script>")[0])
        made = dict(html=fragment, rows=[_maps(text) if text else [] for text in data["texts"]])
        layers = any(row["layer"].startswith("layer ") for rows in made["rows"] for row in rows)
        made["kind"] = "layer" if layers else "map"
    elif block is not None and all(text.pixels is None for text in block.texts):
        made = dict(html=_texts(block), rows=[list(_rows(text, block)) for text in block.texts], kind=block.of)
        made["scores"] = [np.array([row.scores for row in text.rows], "<f4").tobytes() for text in block.texts]
    else:
        raise InputError("this result has no texts with coloured tokens; heatmap, attention, explain and generate have")
    widget = TokenWidget(**made)
    widget.page = page
    if widget.rows and widget.rows[0]:
        widget.layer, widget.head = widget.names[0][0]
    return widget


def split_name(name: str) -> dict[str, str]:
    """Split the first line of the name of a row or map: "layer 3 · head 5" is head 5 of layer 3; "mean" has none."""
    layer, *head = re.split(r" · | (?=head \d)", visible(name.partition("\n")[0]), maxsplit=1)
    return {"layer": layer, "head": "".join(head)}


def _maps(text: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**split_name(each["name"]), "length": text["length"]} for each in text["maps"]]


def _rows(text: TokenText, block: TokenRows) -> Iterator[dict[str, Any]]:
    """Yield what is shown of each row beside its scores."""
    for row in text.rows:
        low, high = row.ends
        outside = [] if row.outside is None else row.outside.nonzero()[0].tolist()
        marks = {"marked": [*row.marked], "against": [*row.against], "outside": outside}
        said = {"name": token_rows.in_line(row.name), "extent": row.extent, "remark": row.remark}
        numbers = {"low": low, "high": high, "signed": row.signed, "summed": block.summed, "length": len(text)}
        yield {**split_name(row.name), **said, **numbers, **{name: list(map(int, at)) for name, at in marks.items()}}


def _texts(block: TokenRows) -> str:
    """Return the legend and every text, its tokens without colours."""
    sections = Markup("").join(
        Markup(
            '<section>{}<p class="told row" aria-live="polite"></p><p class="tokens" role="listbox" '
            'aria-multiselectable="true" aria-label="tokens">{}</p></section>'
        ).format(token_rows.answer(at, text.answer, text.probability, text.about), Markup("").join(_tokens(text)))
        for at, text in enumerate(block.texts)
    )
    return Markup('<div class="texts">{}{}</div>').format(token_rows.legend(block), sections)


def _tokens(text: TokenText) -> Iterator[Markup]:
    for at, (gap, token) in enumerate(spell_tokens(text.tokens, text.words)):
        within = text.span is not None and text.span[0] <= at < text.span[1]
        names = " ".join(["special"] * (text.words[at] is None) + ["within"] * within)
        span = Markup('{}<span data-i="{}" class="{}" role="option" aria-selected="false" tabindex="-1">{}</span><wbr>')
        yield span.format(" " if gap else "", at, names, token)
