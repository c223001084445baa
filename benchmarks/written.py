"""Memory and use of earlier tokens while a model writes: what survival and methods of explanation give each of them.

    python benchmarks/written.py demo/books-mamba2 demo/books-hybrid  # some minutes on two cores

Texts of the books' test set are continued, tokens drawn at temperature 1. For every written token the earlier ones are
scored: the share of all |scores| on the prompt and on the last four tokens, and Spearman's correlation with occlusion.
Means over texts, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse

import numpy as np
import ssmscope
from ssmscope.api.inputs import load_examples
from ssmscope.core.bootstrap import Estimate, estimates, resampled_means
from ssmscope.core.ties import spearman
from ssmscope.render.table import with_interval

METHODS = ("lrp", "gradxinput", "occlusion")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of each prompt")
    parser.add_argument("--written", type=int, default=32, help="tokens written after it")
    given = parser.parse_args()
    for name in given.models:
        model = ssmscope.load(name, dtype="float32")
        rows = load_examples(model, "books", None, given.prompt).sample(given.texts, seed=0).ids.tolist()
        options = dict(max_new_tokens=given.written, temperature=1.0, explain=METHODS)
        result = ssmscope.generate(model, model.encode(ids=rows), **options)
        found = np.array([[measured(text, map_.name) for map_ in text.maps] for text in result])
        means = estimates(resampled_means(found.reshape(len(found), -1), seed=0)).reshape(*found.shape[1:], 3)
        for map_, own in zip(result[0].maps, means):
            shown = [with_interval(Estimate(*each)) for each in own.tolist()]
            print(
                name,
                map_.name,
                "on the prompt",
                shown[0],
                "last four",
                shown[1],
                "with occlusion",
                shown[2],
                flush=True,
            )


def measured(text, name: str) -> tuple[float, float, float]:
    """Return the means over a text's written tokens, without the first ones, before which there is the prompt alone."""
    values, hidden = (next(map_.values for map_ in text.maps if map_.name == each) for each in (name, "occlusion"))
    found = []
    for number in range(4, len(text.written)):
        own, other = (np.abs(each[number, : text.first + number]) for each in (values, hidden))
        share = own / own.sum()
        found.append((share[: text.first].sum(), share[-4:].sum(), spearman(own, other)))
    return tuple(np.mean(found, axis=0))


if __name__ == "__main__":
    main()
