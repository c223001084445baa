"""Plans of reports: small ones that work, and ones whose options, verbs or models are not what they should be."""

import json
from typing import Any

from fuzz.values import HOSTILE, JSON, SENTENCES, Value, Written, encoded
from fuzz.world import World
from hypothesis import strategies as st

ANALYSES = (
    {"heatmap": {"text": "a dull film", "top": 2}},
    {"stability": {"length": 6, "sequences": 1}},
    {"position": {"data": "$data", "regions": "0%:25%"}},
    {"effect": {"clean": "a dull film", "corrupted": "a fine film"}},
)
KEYS = (*"heatmap name for text top layers out json models train report model".split(), "lens show")


@st.composite
def plans(draw: st.DrawFn, world: World) -> Value:
    """A plan in a file; JSON is YAML."""
    document: dict[str, Any] = {
        "title": draw(HOSTILE | SENTENCES),
        "variables": {"data": draw(st.sampled_from((None, *world["labelled"])))},
        "models": draw(st.lists(st.sampled_from(world["model"]), min_size=1, max_size=2)),
        "analyses": draw(st.lists(st.sampled_from(ANALYSES), max_size=2)),
    }
    part = draw(st.sampled_from(("none", "item", "item", "option", "option", "key")))
    if part == "item":
        document["analyses"] = [
            *document["analyses"],
            draw(JSON | st.dictionaries(st.sampled_from(KEYS), JSON, max_size=2)),
        ]
    elif part == "option":
        options = draw(st.dictionaries(st.sampled_from(KEYS[3:]), JSON | HOSTILE, min_size=1, max_size=2))
        document["analyses"] = [*document["analyses"], {"heatmap": {"text": "a film", **options}}]
    elif part == "key":
        document[draw(st.sampled_from((*document, "require", "extra")))] = draw(JSON)
    return Written("plan.yaml", encoded(json.dumps(document, ensure_ascii=draw(st.booleans()))))
