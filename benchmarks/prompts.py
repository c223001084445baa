"""A prompt attack by PromptBench's own loop and by ours: same model, prompt, examples and candidates.

    python benchmarks/prompts.py                       # demo/instruct-mamba2 on SST-2; needs $SSMSCOPE_DATA or the hub
    python benchmarks/prompts.py --model MODEL --limit 100 --attacks stresstest,checklist
    python benchmarks/prompts.py --model mamba-130m --limit 3 --threads 1      # random weights, a shape of timing.py

PromptBench's side is its own `Attack`, whose evaluation asks the model one example at a time, here through the plain
transformers model: one forward pass an example, and the likelier of the label words is the answer. (Its own models
generate text instead, which takes longer.) Ours is `prompt_attack` without a cache on disk. Both are measured in the
same run, and must agree in the accuracy of every prompt that both measured. (deepwordbug's searches part ways:
PromptBench scores the prompt that it starts from as −1 − accuracy, and so takes any change of the first word.) Needs
textattack, and promptbench installed with --no-deps.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nltk
import numpy as np
import torch
from timing import THREADS, machine, reader

from ssmscope.attacks.parts import stopwords
from ssmscope.attacks.prompts import prompt_attack
from ssmscope.attacks.prompts.search import Judge, drawn_from
from ssmscope.evaluation import label_words
from ssmscope.model import Model
from ssmscope.tasks.prompts import CONTENT, content_of, prompts_of
from ssmscope.tasks.text import TextData, load_text


class OneByOne:
    """PromptBench's way to evaluate: every example of every prompt is a forward pass of its own."""

    def __init__(self, model: Model, data: TextData, words: Sequence[str]):
        self.model, self.data, self.words = model, data, words
        self.accuracies: dict[str, float] = {}
        self.evaluations = 0

    @torch.no_grad()
    def __call__(self, prompt: str, dataset: Any, model: Any) -> float:
        prompt = prompt.rstrip()  # the space behind a suffix belongs to the answer
        ids = [found[0] for found in label_words(self.model, self.words, after=prompt[prompt.find(CONTENT) :]).ids]
        right = 0
        for text, label in zip(self.data.texts, self.data.labels):
            filled = prompt.replace(CONTENT, content_of(self.data.name, text))
            tokens = self.model.tokenizer(filled, return_tensors="pt")["input_ids"]
            logits = self.model.module(tokens, use_cache=False).logits[0, -1]
            right += int(logits[ids].argmax()) == label
        self.evaluations += len(self.data)
        self.accuracies[prompt] = right / len(self.data)
        return self.accuracies[prompt]


def theirs(attack: str, prompt: str, evaluate: OneByOne, words: Sequence[str]) -> float:
    """Seconds of PromptBench's own attack."""
    from promptbench.prompt_attack import Attack

    # TextAttack takes the quotes around a word for a part of it, and PromptBench attacks the placeholder unless told
    kept = [*words, *(f"{word}'" for word in words), "content"]
    with contextlib.redirect_stdout(io.StringIO()):
        found = Attack(None, attack, None, prompt, evaluate, kept, verbose=False)
        with drawn_from(0, prompt, attack):
            start = time.perf_counter()
            found.attack()
            return time.perf_counter() - start


def ours(model: Model, data: TextData, attack: str, prompt: str) -> tuple[float, dict[str, float], int]:
    """Seconds, the accuracy under every prompt that was measured to the end, and how many evaluations it would be to
    measure all that were tried."""
    accuracies: dict[str, float] = {}
    tried: set[str] = set()
    right, fewer = Judge.right, Judge.fewer

    def measured(self: Judge, prompts: Sequence[str]) -> np.ndarray:
        found = right(self, prompts)
        tried.update(prompts)
        accuracies.update(zip(prompts, found.mean(1).tolist()))
        return found

    def counted(self: Judge, prompts: Sequence[str], than: int) -> np.ndarray:
        found = fewer(self, prompts, than)
        tried.update(prompts)
        accuracies.update((each, number / len(data)) for each, number in zip(prompts, found.tolist()) if number < than)
        return found

    with patch.object(Judge, "right", measured), patch.object(Judge, "fewer", counted):
        start = time.perf_counter()
        prompt_attack(model, data, attacks=(attack,), template=prompt, seed=0)
        taken = time.perf_counter() - start
    return taken, accuracies, len(tried) * len(data)


@contextlib.contextmanager
def stopwords_at_hand() -> Any:
    """PromptBench needs NLTK's stop words, which may be out of reach: ours lie in a folder of NLTK's layout."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpora" / "stopwords"
        corpus.mkdir(parents=True)
        (corpus / "english").write_text("\n".join(sorted(stopwords()[0])))
        nltk.data.path.insert(0, folder)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo/instruct-mamba2")
    parser.add_argument("--data", default="sst2")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--attacks", default="stresstest,checklist,deepwordbug")
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    model = reader(options.model)
    data = load_text(options.data).sample(options.limit, seed=0)
    known = prompts_of(options.data)
    # ends in a word: PromptBench puts suffixes before the last punctuation, ours stand at the end
    prompt = f"{known.templates[0].partition(CONTENT)[0].rstrip()} {CONTENT}\nAnswer"
    with stopwords_at_hand():
        for attack in options.attacks.split(","):
            ours(model, data.take(range(2)), attack, prompt)  # imports
            evaluate = OneByOne(model, data, known.words)
            slow = theirs(attack, prompt, evaluate, known.words)
            quick, accuracies, evaluations = ours(model, data, attack, prompt)
            both = accuracies.keys() & evaluate.accuracies.keys()
            assert len(both) > 2 and all(accuracies[each] == evaluate.accuracies[each] for each in both), attack
            per_second = evaluate.evaluations / slow, evaluations / quick
            print(
                f"{attack}, {len(data)} examples, same accuracies of the {len(both)} prompts in common: PromptBench "
                f"{evaluate.evaluations:,} evaluations in {slow:.1f} s ({per_second[0]:,.0f} a second), ours "
                f"{evaluations:,} in {quick:.2f} s ({per_second[1]:,.0f}): {per_second[1] / per_second[0]:.1f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
