"""The notebook widget: traits hold the result's numbers, and its script colours tokens in a browser as pages do. Needs
anywidget; what is tried in a browser needs playwright and Debian's chromium."""

import base64
import importlib.util
import json
import re
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest
import reported
from attended import IMAGE, make, make_text
from refusals import refuses
from tabs import untroubled
from ssmscope.errors import InputError

pytest.importorskip("anywidget", reason="the widget needs anywidget: pip install '.[notebook]'")

from ssmscope.render.colours import STEPS  # noqa: E402
from ssmscope.render.widget import TokenWidget, split_name  # noqa: E402

HOSTILE = ["<b>x", " &amp;", " film", " ends"]
TRAITS = ("html", "rows", "scale", "kind", "text", "layer", "head", "tokens")

STUB = """
const on = {}, state = STATE;
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
state.scores = state.scores.map((text) => new DataView(bytes(text).buffer));
window.saved = [];
window.model = {
  get: (name) => state[name],
  set: (name, value) => {
    const changed = JSON.stringify(state[name]) !== JSON.stringify(value);
    state[name] = value;
    if (changed) for (const call of on[`change:${name}`] ?? []) call();
  },
  save_changes: () => saved.push(structuredClone([state.text, state.layer, state.head, state.tokens])),
  on: (name, call) => (on[name] ??= []).push(call),
  off: (name, call) => { on[name] = on[name].filter((each) => each !== call); },
};
const code = URL.createObjectURL(new Blob([CODE], {type: "text/javascript"}));
window.clear = (await import(code)).default.render({model, el: document.querySelector("main")});
window.ready = true;
"""
"""A page's script that gives the widget's module what anywidget gives it."""


@pytest.fixture(scope="module")
def heatmap():
    return reported.heatmap([HOSTILE, ["A", " dull", " film"]], layers=3, score="survival")


@pytest.fixture
def shown(browser):
    """`shown(widget)` is a page that shows it; at the end nothing may have been fetched, and nothing complained."""
    with ExitStack() as around:

        def show(widget: TokenWidget):
            state = {name: getattr(widget, name) for name in TRAITS}
            state["scores"] = [base64.b64encode(each).decode() for each in widget.scores]
            script = STUB.replace("STATE", json.dumps(state), 1).replace("CODE", json.dumps(widget._esm), 1)
            page = around.enter_context(closing(browser.new_page()))
            around.enter_context(untroubled(page, "blob:"))
            escaped = script.replace("</", "<\\/").replace("<!--", "<\\!--")
            page.set_content(f"<style>{widget._css}</style><main></main><script type='module'>{escaped}</script>")
            page.wait_for_function("window.ready")
            return page

        yield show


def shades(page) -> list[str]:
    """The colour class of every token of the shown text, or its level."""
    found = page.eval_on_selector_all(
        "section:not([hidden]) [data-i]", "all => all.map((each) => [+each.dataset.i, each.className, each.dataset.l])"
    )
    return [level or "".join(re.findall(r"v\d+|out", names)) for _, names, level in sorted(found)]


def test_traits_are_the_results_numbers(heatmap) -> None:
    widget = heatmap.widget()
    for text, scores, names in zip(heatmap, widget.scores, widget.names):
        rows = np.frombuffer(scores, "<f4").reshape(-1, len(text))
        np.testing.assert_array_equal(rows, np.vstack([text.mean[None], text.scores]))
        assert names == [("mean", ""), *((f"layer {layer}", "") for layer in heatmap.layers)]
    assert (widget.text, widget.layer, widget.head, widget.tokens) == (0, "mean", "", [])
    low, high = heatmap.token_rows().texts[0].rows[0].ends
    assert (widget.rows[0][0]["low"], widget.rows[0][0]["high"]) == (low, high)
    assert "<b>x" not in widget.html and "&lt;b&gt;x" in widget.html
    view, _ = widget._repr_mimebundle_()
    assert view["text/html"] == heatmap._repr_html_()


def test_maps_are_those_of_the_page() -> None:
    result = make(make_text(9, maps=2, head="3"), make_text(7))
    widget = result.widget()
    assert widget.names == [[("mean of |weight| over 2 maps", ""), ("layer 0", "head 3"), ("layer 1", "head 3")]] + [
        [("layer 0", "")]
    ]
    assert widget.html in result._repr_html_() and widget.scores == [] and widget.kind == "layer"


def test_names_of_rows_are_layers_and_heads() -> None:
    assert split_name("layer 3 · ssm · channels 0–95") == {"layer": "layer 3", "head": "ssm · channels 0–95"}
    assert split_name("layer 3 head 5\nselectivity 0.40") == {"layer": "layer 3", "head": "head 5"}
    assert split_name("ig") == {"layer": "ig", "head": ""}


def test_what_there_is_not_is_refused(heatmap) -> None:
    widget = heatmap.widget()
    for name, value, said in (("layer", "layer 3", "'layer 2'"), ("tokens", [4], "0 to 3"), ("text", 2, "0 to 1")):
        refuses(said, setattr, widget, name, value)
    widget.text = 1
    with pytest.raises(InputError, match="0 to 2"):
        widget.tokens = [3]
    image = replace(heatmap, texts=(replace(heatmap[0], pixels=IMAGE),))
    refuses("no texts with coloured tokens", image.widget)


def test_a_chosen_layer_colours_the_tokens_and_tells_python(heatmap, shown) -> None:
    page = shown(heatmap.widget())
    wanted = [
        [f"v{shade}" if shade >= 0 else "out" for shade in row.shades()] for row in heatmap.token_rows().texts[0].rows
    ]
    assert shades(page) == wanted[0] != wanted[2]
    page.get_by_label("layer 1").check(force=True)
    assert shades(page) == wanted[2] and page.evaluate("saved.at(-1)") == [0, "layer 1", "", []]
    page.locator("section:not([hidden]) [data-i='1']").click()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.evaluate("saved.at(-1)") == [0, "layer 1", "", [1, 2]]
    total = float(heatmap[0].scores[1][[1, 2]].sum())
    assert f"sum {float(f'{total:.3g}'):g}" in page.locator("section:not([hidden]) .told").inner_text()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Escape")
    assert page.evaluate("saved.at(-1)") == [0, "layer 1", "", []]
    page.evaluate("model.set('text', 1)")  # from Python
    second = heatmap.token_rows().texts[1].rows[2]
    assert shades(page) == [f"v{shade}" if shade >= 0 else "out" for shade in second.shades()]
    before = page.evaluate("[clear(), model.set('layer', 'mean')]") and shades(page)
    assert before == [f"v{shade}" if shade >= 0 else "out" for shade in second.shades()]


def test_maps_of_layers_that_look_ahead_have_every_key(shown) -> None:
    text = make_text(6)
    values = np.arange(36, dtype=np.float32).reshape(6, 6) / 36
    both = replace(text, bidirectional=True, maps=(replace(text.maps[0], values=values),))
    page = shown(make(both).widget())
    page.evaluate("model.set('tokens', [2])")
    assert shades(page) == [str(round(each / 17 * STEPS)) for each in range(12, 18)]


def test_the_result_stands_in_where_anywidget_is_not_installed(heatmap, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert heatmap.widget() is heatmap


def test_a_chosen_head_changes_the_map(shown) -> None:
    text = make_text(9, head="0")
    negative = replace(text.maps[0], head="1", values=-text.maps[0].values)
    text = replace(text, maps=(text.maps[0], negative))
    page = shown(make(text).widget())
    page.get_by_label("layer 0").check(force=True)
    before = shades(page)
    page.get_by_label("head 1").check(force=True)
    assert shades(page) == ["" if level == "" else str(-int(level)) for level in before] != before
    page.locator("section [data-i='5']").click()
    assert page.evaluate("saved.at(-1)") == [0, "layer 0", "head 1", [5]]
    page.evaluate("model.set('tokens', [3])")
    row = text.maps[1].values[3, :4]
    levels = np.rint(row / np.abs(row).max() * STEPS).astype(int)
    assert np.abs(np.array(shades(page)[:4], dtype=int) - levels).max() <= 1 and shades(page)[4:] == [""] * 5
