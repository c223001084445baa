"""Attention maps as HTML: a text whose tokens show what they attend to, beside the map, in light and dark.

The one script of the page is inline, fetches nothing, keeps everything in a function of its own, and finds its piece of
the page by the key of its result, so that several results, or one shown twice, work beside each other. Where no script
runs there is the picture.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.interp.attention.maps import CLIPPED, causal, coarse, heads_name, limit, span_name, title
from ssmscope.show.signed import SIGNED, SIGNED_ON_DARK, STEPS, brief, shades
from ssmscope.show.tokens import ink, visible, written

if TYPE_CHECKING:
    from ssmscope.interp.attention.result import AttendedText, AttentionMap, ImplicitAttention

BUDGET = 12_000_000
"""How many bytes a fragment has about at most; maps that do not fit are listed."""
TEXT_TOKENS = 1500
"""How many tokens a text has at most that is written out; of longer ones there is the picture."""
TABLE_ROWS = 200
"""How many maps of a text the table of readouts has."""
NAMED = 12
"""How many of the maps that are left out are named."""


def fragment(result: ImplicitAttention, png: bytes) -> str:
    """A self-contained piece of HTML with the texts of the result and its picture, which is all there is where no
    script runs."""
    picture = base64.b64encode(png).decode()
    sections = [_Section(number, text) for number, text in enumerate(result)]
    room = BUDGET - len(picture) - len(_style()) - len(_SCRIPT) - 5000
    for section in sections:
        room -= section.enter(room)
    # In turns, so that every text has a map before one has two.
    for turn in range(max((len(text.maps) for text in result), default=0)):
        for section in sections:
            room -= section.add(turn, room)
    data = [section.data() for section in sections]
    # A "<" in the data could close the element that holds it.
    packed = json.dumps({"steps": STEPS, "light": shades(SIGNED), "dark": shades(SIGNED_ON_DARK), "texts": data})
    packed = packed.replace("<", "\\u003c")
    key = hashlib.sha256((packed + picture).encode()).hexdigest()[:16]
    return (
        f'<div class="ssmscope-attention" data-key="{key}"><style>{_style()}</style>{_legend(result)}'
        f"{''.join(section.html() for section in sections)}"
        f'<details class="still" open><summary>The maps as a picture</summary>'
        f'<img alt="{escape(visible(result.headline))}" src="data:image/png;base64,{picture}"></details>'
        f'<script type="application/json">{packed}</script>'
        f"<script>{_SCRIPT.replace('KEY', key)}</script></div>"
    )


def _legend(result: ImplicitAttention) -> str:
    return (
        f'<p class="legend"><span>{escape(heads_name(result))}</span>'
        '<span class="scale">−limit <i></i> limit</span>'
        f"<span>limit: the {CLIPPED:g}th percentile of |weight| of each map</span>"
        "<span>in the map rows are queries, columns keys</span>"
        '<span hidden class="live">point at a token, or move with the arrow keys, to see what it attends to; click or'
        " press Enter to keep it, Escape to let go. Weights here are in steps of 1/127 of the largest in their row"
        "</span></p>"
    )


class _Section:
    """One text: what of it is in the page, and how long that is."""

    def __init__(self, number: int, text: AttendedText) -> None:
        self.number, self.text = number, text
        self.written = ""
        self.maps: list[tuple[str, dict[str, Any]]] = []
        self.left_out: list[AttentionMap] = []

    def enter(self, room: int) -> int:
        """Write the tokens out, if they fit, and return how many bytes they take."""
        if len(self.text) > TEXT_TOKENS or not self.text.maps or not len(self.text.queries):
            return 0
        written_out = _pixels(self.text) if self.text.pixels is not None else _tokens(self.text)
        size = len(written_out.encode()) + 2000
        if size > room:
            return 0
        self.written = written_out
        return size

    def add(self, index: int, room: int) -> int:
        """Put the map of that number in, if there is one and it fits, and return how many bytes it takes."""
        if index >= len(self.text.maps):
            return 0
        map_ = self.text.maps[index]
        packed = int(causal(self.text).sum()) * 4 // 3 + 16 * len(self.text.queries) + 300
        if not self.written or packed > room:
            self.left_out.append(map_)
            return 0
        self.maps.append((title(map_), _packed(map_, self.text)))
        return packed

    def data(self) -> dict[str, Any] | None:
        """What the script needs to know; None for a text that is only in the picture."""
        if not self.maps:
            return None
        edges = None if self.text.edges is None else self.text.edges.tolist()
        maps = [{"name": name, **packed} for name, packed in self.maps]
        return {"length": len(self.text), "queries": self.text.queries.tolist(), "edges": edges, "maps": maps}

    def html(self) -> str:
        text = self.text
        marked = f'<span class="range">{span_name(text)}</span>' if text.span else ""
        return (
            f'<section data-text="{self.number}"><p class="answer"><span class="number">{self.number}</span> '
            f"answer <b>“{escape(visible(text.answer))}”</b> p = {text.probability:.3f}{marked}</p>"
            f"{self._live()}{self._absent()}{_readouts(text)}</section>"
        )

    def _live(self) -> str:
        if not self.maps:
            return ""
        options = "".join(f'<option value="{i}">{escape(name)}</option>' for i, (name, _) in enumerate(self.maps))
        return (
            f'<div hidden class="live"><p class="controls"><select aria-label="map">{options}</select>'
            '<label><input type="checkbox"> each row on its own scale</label><span class="end"></span></p>'
            f'<div class="both"><div>{self.written}<p class="told" aria-live="polite"></p></div>'
            '<div class="map" role="img" aria-label="the map: rows are queries, columns keys"><canvas></canvas>'
            '<i class="row"></i><i class="column"></i></div></div></div>'
        )

    def _absent(self) -> str:
        if not self.left_out:
            return ""
        names = ", ".join(escape(title(map_)) for map_ in self.left_out[:NAMED])
        more = f" and {len(self.left_out) - NAMED} more" if len(self.left_out) > NAMED else ""
        if self.written:
            why = "Left out here for the size of the page"
        else:
            why = f"A text of {len(self.text)} tokens is too long to be written out here; its maps"
        return f'<p class="absent">{why}: {names}{more}. The .json file has them.</p>'


def _packed(map_: AttentionMap, text: AttendedText) -> dict[str, Any]:
    """One map for display: every row in 8 bits of its own scale, only the keys that do not come after the query.

    A shown weight is off by at most 1/254 of the largest in its row; the result's other files hold the weights.
    """
    seen = causal(text)
    values = np.where(seen, map_.values, 0).astype(np.float64)
    scale = np.abs(values).max(axis=1, keepdims=True, initial=0.0)
    whole = np.rint(np.divide(values * 127, scale, out=np.zeros_like(values), where=scale > 0)).astype(np.int8)
    end, largest = limit(map_, text)
    return {
        "end": end,
        "largest": largest,
        "rows": base64.b64encode(whole[seen].tobytes()).decode(),
        "scale": base64.b64encode(scale[:, 0].astype("<f4").tobytes()).decode(),
        "sink": None if map_.sink is None else base64.b64encode(map_.sink.astype("<f4").tobytes()).decode(),
    }


def _tokens(text: AttendedText) -> str:
    """The text in its flow, every token a span with its position."""
    asked = _asked(text)
    pieces = [_state(text)]
    for position, (gap, token) in enumerate(written(text.tokens, text.words)):
        pieces.append(f"{' ' if gap else ''}<span {_names(text, position, asked)}>{escape(token)}</span><wbr>")
    return f'<p class="{_flow(text)}">{"".join(pieces)}</p>'


def _pixels(text: AttendedText) -> str:
    """The image, and beside it its tokens in their places, those that are no pixels after them."""
    assert text.pixels is not None
    tall, wide = text.pixels.shape[:2]
    asked = _asked(text)
    places = [i for i, word in enumerate(text.words) if word is not None]
    others = [i for i, word in enumerate(text.words) if word is None]
    cells = "".join(
        f'<span {_names(text, i, asked)} data-name="{escape(visible(text.tokens[i]))}"></span>' for i in places
    )
    rest = "".join(f"<span {_names(text, i, asked)}>{escape(visible(text.tokens[i]))}</span> " for i in others)
    side = max(4, min(16, 300 // max(tall, wide, 1)))
    size = f'width="{wide * side}" height="{tall * side}"'
    return (
        f'<div class="{_flow(text)}"><div class="image">'
        f'<img alt="the image" {size} src="data:image/png;base64,{_image(text.pixels)}">'
        f'<div class="grid" style="grid-template-columns: repeat({wide}, {side}px); grid-auto-rows: {side}px">{cells}'
        f"</div></div><p>{_state(text)}{rest}</p></div>"
    )


def _image(pixels: np.ndarray) -> str:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    shown = pixels if pixels.shape[2] == 3 else pixels.mean(-1, keepdims=True).repeat(3, axis=-1)
    imsave(buffer, shown.clip(0, 1), format="png")
    return base64.b64encode(buffer.getvalue()).decode()


def _state(text: AttendedText) -> str:
    return '<span class="state">state</span> ' if any(map_.sink is not None for map_ in text.maps) else ""


def _flow(text: AttendedText) -> str:
    """The class of what holds the tokens: "few" where only some have a row, which are then underlined."""
    return "tokens" if len(_asked(text)) == len(text) else "tokens few"


def _asked(text: AttendedText) -> set[int]:
    """The tokens that have a row: the queries, or all of a cell."""
    return set(range(len(text))) if text.edges is not None else set(text.queries.tolist())


def _names(text: AttendedText, position: int, asked: set[int]) -> str:
    names = ["asked"] if position in asked else []
    if text.words[position] is None:
        names.append("special")
    if text.span is not None and text.span[0] <= position < text.span[1]:
        names.append("marked")
    focus = ' tabindex="-1"' if position in asked else ""
    return f'data-i="{position}" class="{" ".join(names)}"{focus}'


def _readouts(text: AttendedText) -> str:
    names = ("distance", "recent", "sink", "outside")[: 3 if text.span is None else 4]
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = []
    for map_ in text.maps[:TABLE_ROWS]:
        found = [getattr(map_.readouts, name) for name in names]
        cells = "".join(f"<td>{'' if math.isnan(value) else brief(value)}</td>" for value in found)
        rows.append(f"<tr><td>{escape(title(map_))}</td>{cells}</tr>")
    rest = f"<p>{TABLE_ROWS} of {len(text.maps)} maps</p>" if len(text.maps) > TABLE_ROWS else ""
    rest += f"<p>{escape(remark)}</p>" if (remark := coarse([text])) else ""
    return (
        f"<details><summary>Readouts: how far back, and on what</summary>"
        f"<table><tr><th>map</th>{head}</tr>{''.join(rows)}</table>{rest}</details>"
    )


@lru_cache(maxsize=1)
def _style() -> str:
    return _STYLE.replace("LIGHT;", _level_rules(SIGNED)).replace("DARK;", _level_rules(SIGNED_ON_DARK))


def _level_rules(stops: tuple[str, ...]) -> str:
    prefix = ".ssmscope-attention"
    colours = shades(stops)
    rules = [
        f'{prefix} [data-l="{level}"] {{ background: {colour}; color: {ink(colour)} }}'
        for level, colour in enumerate(colours, start=-STEPS)
    ]
    return "\n".join([*rules, f"{prefix} .scale i {{ background: linear-gradient(90deg, {', '.join(stops)}) }}"])


_STYLE = """
.ssmscope-attention { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --mark: #d1540a;
  color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
LIGHT;
@media (prefers-color-scheme: dark) {
.ssmscope-attention { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --paper: #0f141a; --mark: #ff9f4a; }
DARK;
}
.ssmscope-attention [hidden] { display: none !important; }
.ssmscope-attention p { margin: 0 0 10px; }
.ssmscope-attention .legend { display: flex; flex-wrap: wrap; gap: 4px 28px; color: var(--soft); font-size: 13px; }
.ssmscope-attention .scale i { display: inline-block; width: 120px; height: 10px; margin: 0 3px; border-radius: 2px; }
.ssmscope-attention section { border-top: 1px solid var(--line); padding: 14px 0 16px; }
.ssmscope-attention .answer, .ssmscope-attention summary, .ssmscope-attention .absent, .ssmscope-attention .controls,
.ssmscope-attention .told { color: var(--soft); font-size: 13px; }
.ssmscope-attention .answer b { color: var(--ink); font-size: 15px; overflow-wrap: anywhere; }
.ssmscope-attention .number { display: inline-block; min-width: 1.6em; font-weight: 600; }
.ssmscope-attention .range { margin-left: 24px; color: var(--mark); }
.ssmscope-attention .controls { display: flex; flex-wrap: wrap; gap: 6px 20px; align-items: center; }
.ssmscope-attention select { font: inherit; color: var(--ink); background: var(--paper); max-width: 100%;
  border: 1px solid var(--line); border-radius: 4px; padding: 2px 4px; }
.ssmscope-attention .both { display: flex; flex-wrap: wrap; gap: 16px 28px; align-items: flex-start; }
.ssmscope-attention .both > div:first-child { flex: 1 1 420px; min-width: 0; }
.ssmscope-attention .tokens { line-height: 2; overflow-wrap: anywhere; }
.ssmscope-attention .tokens span { padding: 2px 3px; margin: 0 1px; border-radius: 3px; white-space: pre-wrap;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.ssmscope-attention .asked { cursor: pointer; }
.ssmscope-attention .few .asked { box-shadow: inset 0 -2px var(--ink); font-weight: 600; }
.ssmscope-attention .special, .ssmscope-attention .state { font-style: italic; }
.ssmscope-attention .state { border: 1px solid var(--line); }
.ssmscope-attention .marked { text-decoration: underline 2px var(--mark); text-underline-offset: 4px; }
.ssmscope-attention .after { opacity: 0.45; }
.ssmscope-attention .query { outline: 2px solid var(--ink); outline-offset: 0; }
.ssmscope-attention .pinned { outline-color: var(--mark); }
.ssmscope-attention .key { outline: 2px dotted var(--ink); }
.ssmscope-attention .told { min-height: 3em; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.ssmscope-attention .told b { color: var(--ink); }
.ssmscope-attention .image { display: flex; flex-wrap: wrap; gap: 16px; }
.ssmscope-attention .image img { image-rendering: pixelated; }
.ssmscope-attention .grid { display: grid; }
.ssmscope-attention .grid span { padding: 0; margin: 0; border-radius: 0; }
.ssmscope-attention .grid .marked { box-shadow: inset 0 0 0 1px var(--mark); }
.ssmscope-attention .grid .query { z-index: 1; }
.ssmscope-attention .map { position: relative; flex: 0 1 auto; max-width: 100%; cursor: crosshair; line-height: 0; }
.ssmscope-attention .map canvas { max-width: 100%; image-rendering: pixelated; border-left: 1px solid var(--line);
  border-bottom: 1px solid var(--line); box-sizing: border-box; }
.ssmscope-attention .map i { position: absolute; pointer-events: none; box-sizing: border-box;
  border: 1px solid var(--mark); }
.ssmscope-attention .map .row { left: 0; right: 0; min-height: 3px; }
.ssmscope-attention .map .column { top: 0; bottom: 0; min-width: 3px; opacity: 0.5; }
.ssmscope-attention .still img { max-width: 100%; background: #fff; }
.ssmscope-attention summary { cursor: pointer; padding: 3px 0; }
.ssmscope-attention table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.ssmscope-attention th, .ssmscope-attention td { padding: 3px 16px 3px 0; text-align: left;
  border-bottom: 1px solid var(--line); }
"""

_SCRIPT = r"""
(() => {
  "use strict";
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const floats = (text) => new Float32Array(bytes(text).buffer);
  const short = (weight) => Number(weight.toPrecision(3)).toString().replace("-", "−");
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  for (const root of document.querySelectorAll('.ssmscope-attention[data-key="KEY"]:not([data-live])')) {
    root.dataset.live = "";
    const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
    for (const part of root.querySelectorAll(".live")) part.hidden = false;
    root.querySelector(".still").open = data.texts.some((text) => !text);
    root.querySelectorAll("section").forEach((section, number) => {
      if (data.texts[number]) start(section, data.texts[number], data);
    });
  }

  function start(section, text, data) {
    const {queries, edges, maps} = text;
    const [select, own, told, end] = [".controls select", ".controls input", ".told", ".end"].map((s) =>
      section.querySelector(s));
    const canvas = section.querySelector("canvas"), frame = section.querySelector(".map");
    const spans = [];
    for (const span of section.querySelectorAll("[data-i]")) spans[+span.dataset.i] = span;
    const state = section.querySelector(".state");
    // A cell is a token, or a group of them in a pooled map; rows are numbered as the map's queries are.
    const cells = edges ? edges.length - 1 : text.length;
    const cellOf = new Int32Array(text.length), rowOf = new Int32Array(cells).fill(-1);
    for (let cell = 0; cell < cells; cell++)
      for (let i = edges ? edges[cell] : cell; i < (edges ? edges[cell + 1] : cell + 1); i++) cellOf[i] = cell;
    queries.forEach((query, row) => { rowOf[cellOf[query]] = row; });
    const begins = [0];
    queries.forEach((query, row) => { begins.push(begins[row] + cellOf[query] + 1); });
    const sunk = maps.some((map) => map.sink);
    const across = cells + (sunk ? 2 * unit() : 0), whole = queries.length === cells, largest = 420;
    // Of a long text several weights share a dot of the canvas, which shows the strongest.
    const fold = Math.max(1, Math.round(across / largest)), foldRows = whole ? fold : 1;
    const wide = Math.ceil(across / fold), tall = Math.ceil(queries.length / foldRows);
    let map, chosen = queries.length - 1, pinned = null, at = spans[queries[chosen]];

    function unit() { return Math.max(1, Math.ceil(cells * 0.02)); }
    function name(cell) {
      if (edges) return `tokens ${edges[cell]}–${edges[cell + 1] - 1}`;
      return `${cell} “${spans[cell].dataset.name ?? spans[cell].textContent}”`;
    }
    function weight(row, cell) { return map.values[begins[row] + cell] * map.scales[row] / 127; }
    function level(value, limit) {
      return limit > 0 ? Math.round(Math.max(-1, Math.min(1, value / limit)) * data.steps) : 0;
    }

    function pick(index) {
      const from = maps[index];
      map = {...from, values: new Int8Array(bytes(from.rows).buffer), scales: floats(from.scale),
        sinks: from.sink && floats(from.sink)};
      end.textContent = `limit ±${short(map.end)}`
        + (map.largest > map.end ? `, largest ${short(map.largest)}` : "");
      paint();
      show();
    }

    function paint() {
      canvas.width = wide;
      canvas.height = tall;
      canvas.style.width = `${Math.max(Math.min(largest, across * 16), whole ? 160 : largest)}px`;
      canvas.style.height = whole ? "auto" : `${Math.min(24 * queries.length, largest)}px`;
      if (whole) canvas.style.aspectRatio = `${wide} / ${tall}`;
      const strongest = new Float32Array(wide * tall).fill(NaN);
      const put = (row, column, value) => {
        const at = Math.floor(row / foldRows) * wide + Math.floor(column / fold);
        if (!(Math.abs(strongest[at]) >= Math.abs(value))) strongest[at] = value;
      };
      const before = sunk ? 2 * unit() : 0;
      for (let row = 0; row < queries.length; row++) {
        if (map.sinks) for (let column = 0; column < before / 2; column++) put(row, column, map.sinks[row]);
        for (let cell = 0; cell < begins[row + 1] - begins[row]; cell++) put(row, before + cell, weight(row, cell));
      }
      const colours = (scheme.matches ? data.dark : data.light).map((c) =>
        [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
      const context = canvas.getContext("2d"), image = context.createImageData(wide, tall);
      strongest.forEach((value, at) => {
        if (!Number.isNaN(value)) image.data.set([...colours[level(value, map.end) + data.steps], 255], 4 * at);
      });
      context.putImageData(image, 0, 0);
    }

    function show(key = null) {
      const row = chosen, cell = cellOf[queries[row]];
      let limit = map.end;
      if (own.checked) limit = Math.max(map.scales[row], map.sinks ? Math.abs(map.sinks[row]) : 0);
      spans.forEach((span, i) => {
        const seen = cellOf[i] <= cell;
        if (seen) span.dataset.l = level(weight(row, cellOf[i]), limit);
        else delete span.dataset.l;
        span.classList.toggle("after", !seen);
        span.classList.toggle("query", cellOf[i] === cell);
        span.classList.toggle("pinned", cellOf[i] === cell && pinned !== null);
        span.classList.toggle("key", key !== null && cellOf[i] === key);
      });
      if (state) {
        if (map.sinks) state.dataset.l = level(map.sinks[row], limit);
        else delete state.dataset.l;
      }
      place(key);
      tell(row, cell, key);
      const now = spans[queries[row]];
      at.tabIndex = -1;
      now.tabIndex = 0;
      at = now;
    }

    function place(key) {
      const before = sunk ? 2 * unit() : 0, [mark, column] = [".row", ".column"].map((s) => frame.querySelector(s));
      mark.style.top = `${100 * chosen / (tall * foldRows)}%`;
      mark.style.height = `${100 / (tall * foldRows)}%`;
      column.hidden = key === null;
      column.style.left = `${100 * (before + key) / (wide * fold)}%`;
      column.style.width = `${100 / (wide * fold)}%`;
    }

    function tell(row, cell, key) {
      const found = Array.from({length: cell + 1}, (_, s) => [name(s), weight(row, s)]);
      if (map.sinks) found.unshift(["state", map.sinks[row]]);
      const strongest = found.slice().sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 5);
      const bold = document.createElement("b");
      bold.textContent = name(cell);
      const kept = pinned === null ? "" : " (kept)";
      const list = strongest.map(([of, value]) => `${of} ${short(value)}`).join(", ");
      const pointed = key === null || key > cell ? "" : ` · ${name(key)}: ${short(weight(row, key))}`;
      told.replaceChildren("query ", bold, `${kept}${pointed} · strongest: ${list}`);
    }

    function look(row, key = null) {
      if (row < 0) return;
      if (pinned === null) chosen = row;
      show(key);
    }
    function pin(row) {
      if (row < 0) return;
      pinned = pinned === row ? null : row;
      chosen = row;
      show();
    }
    function leave() {
      if (pinned !== null) chosen = pinned;
      show();
    }
    const tokenAt = (event) => event.target.closest("[data-i]");
    const rowAt = (span) => rowOf[cellOf[+span.dataset.i]];
    const tokens = section.querySelector(".tokens");
    tokens.addEventListener("mouseover", (event) => {
      const span = tokenAt(event);
      if (span) pinned === null ? look(rowAt(span)) : show(cellOf[+span.dataset.i]);
    });
    tokens.addEventListener("focusin", (event) => {
      const span = tokenAt(event);
      if (span && rowAt(span) !== chosen) pinned === null ? look(rowAt(span)) : show(cellOf[+span.dataset.i]);
    });
    tokens.addEventListener("mouseleave", leave);
    tokens.addEventListener("click", (event) => {
      const span = tokenAt(event);
      if (span) pin(rowAt(span));
    });
    tokens.addEventListener("keydown", (event) => {
      const span = tokenAt(event), step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1}[event.key];
      if (!span) return;
      if (step) {
        const next = Math.max(0, Math.min(queries.length - 1, rowAt(span) + step));
        spans[queries[next]].focus();
      } else if (event.key === "Enter" || event.key === " ") pin(rowAt(span));
      else if (event.key === "Escape") { pinned = null; show(); }
      else return;
      event.preventDefault();
    });
    function pointed(event) {
      const box = canvas.getBoundingClientRect(), before = sunk ? 2 * unit() : 0;
      const row = Math.floor((event.clientY - box.top) / box.height * tall * foldRows);
      const cell = Math.floor((event.clientX - box.left) / box.width * wide * fold) - before;
      const inside = Math.max(0, Math.min(queries.length - 1, row));
      return [inside, cell >= 0 && cell <= cellOf[queries[inside]] ? cell : null];
    }
    frame.addEventListener("mousemove", (event) => look(...pointed(event)));
    frame.addEventListener("mouseleave", leave);
    frame.addEventListener("click", (event) => pin(pointed(event)[0]));
    select.addEventListener("change", () => pick(+select.value));
    own.addEventListener("change", () => show());
    scheme.addEventListener("change", paint);
    pick(0);
  }
})();
"""
