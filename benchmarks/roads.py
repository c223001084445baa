"""Layers by which answers come from tokens, over many texts: attention knockout on the shipped language models.

    python benchmarks/roads.py    # some minutes on two cores

- Stories (demo/babi-*): two persons walk, and one of them is asked for. Sources by their role: the place that answers,
  the person who went there, the other place, the person in the question, the last token.
- Books (demo/books-*): a name that came once in the 64 tokens before and is predicted again. Sources: the name, the
  token behind it, a token half way, the last token.

Each line is one role: the change of the answer's probability, in per cent, with its edges to the last token cut (with
--roads what the convolution carries of it), in all layers and layer by layer, with 95 % bootstrap intervals over texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

import numpy as np
import ssmscope
from ssmscope.core.bootstrap import estimates, resampled_means
from ssmscope.data.babi import questions
from ssmscope.zoo.documents import load_documents

STORIES = "demo/babi-mamba2", "demo/babi-diff-mamba", "demo/babi-hybrid"
BOOKS = "demo/books-mamba2", "demo/books-hybrid"
CONTEXT = 64

Asked = tuple[list[int], int, Mapping[str, int]]
"""A text's tokens, the answer's id, and the position of every role."""


def stories(model: ssmscope.Model) -> Iterator[Asked]:
    """Solved stories of two facts, either of which is asked for."""
    for one in questions("qa1", length=0, examples=2000, split="test", facts=(2, 2), seed=1).examples:
        (own,) = one.needles
        other = next(fact for fact in one.facts if not fact.supporting)
        batch = model.encode(f"{one.context} {one.question}")
        words = one.context.split() + one.question.split()
        if len(words) != batch.lengths[0] or other.text.split()[0] == own.text.split()[0]:
            continue
        (answer,) = model.encode(one.answer).input_ids[0].tolist()
        if int(model.run(batch, last_only=True).logits.argmax()) == answer:
            roles = {"the place": own.last_word - 2, "its person": own.first_word}
            roles |= {"the other place": other.last_word - 2, "the other person": other.first_word}
            roles |= {"the person asked for": len(words) - 2, "the last token": len(words) - 1}
            yield batch.input_ids[0].tolist(), answer, roles


def names(model: ssmscope.Model) -> Iterator[Asked]:
    """Names of a book's text that are predicted where they come again."""
    for text in load_documents("books"):
        batch = model.encode(text)
        (row,), (tokens,) = batch.input_ids.tolist(), batch.tokens
        for at in range(CONTEXT, len(row)):
            name, before = tokens[at].strip(" Ġ▁"), row[at - CONTEXT : at]
            first = before.index(row[at]) if before.count(row[at]) == 1 else CONTEXT
            if len(name) < 4 or not name.istitle() or first > CONTEXT - 8:
                continue
            if int(model.run(model.encode(ids=before), last_only=True).logits.argmax()) == row[at]:
                half = (first + CONTEXT) // 2
                roles = {"the name": first, "behind it": first + 1, "half way": half, "the last token": CONTEXT - 1}
                yield before, row[at], roles


def measure(name: str, count: int, cut: str) -> Iterator[str]:
    model = ssmscope.load(name)
    found, said, roles = [], [], {}
    for ids, answer, roles in (stories if name in STORIES else names)(model):
        spans = [str(at) for at in roles.values()]
        result = ssmscope.knockout(model, model.encode(ids=ids), from_=spans, window=1, roads=cut, answer=answer)
        found.append(result.changes[..., 0])
        said.append(result.probability[0])
        if len(found) == count:
            break
    rows = resampled_means(np.stack(found).reshape(len(found), -1), seed=0)
    ends = estimates(rows).reshape(*found[0].shape, 3)
    layers = " | ".join(f"{cut.first}" for cut in result.cuts[1:])
    yield f"\n{name}: {len(found)} texts, probability {np.mean(said):.2f}\n\n| from | all | {layers} |"
    yield "|---" * (len(result.cuts) + 1) + "|"
    for role, line in zip(roles, ends):
        cells = [f"{value:.0f} [{low:.0f}, {high:.0f}]" for value, low, high in (100 * line).tolist()]
        yield f"| {role} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join((*STORIES, *BOOKS)))
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--roads", default="states", choices=("states", "convolution", "both"), help="what is cut")
    options = parser.parse_args()
    for name in options.models.split(","):
        for line in measure(name, options.examples, options.roads):
            print(line, flush=True)


if __name__ == "__main__":
    main()
