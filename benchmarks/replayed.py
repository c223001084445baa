"""What attacks ask of a model, asked again of a large one: by PromptBench's and TextAttack's loops and by ours.

    SSMSCOPE_DATA=… python benchmarks/replayed.py record asked.json              # needs textattack
    python benchmarks/replayed.py replay asked.json --shape falcon --device cuda  # needs neither it nor data

`record` attacks the demos on SST-2, and keeps the prompts and texts in the batches in which they are asked about.
`replay` asks them of a random model of a shape of large.py or timing.py: the searches, which cost the same whatever the
model, are left out. PromptBench's loop is one forward pass an example, TextAttack's 32 texts at a time, padded to the
longest of them, both through the model's own forward pass in transformers, on a GPU with the kernels of mamba_ssm and
causal_conv1d where transformers finds these packages: which ran is printed. Of theirs an even sample is run, for
--seconds, and the rates of one run are compared: evaluations that a search of theirs makes, over the seconds in which
theirs and ours make them or find that they need not. Seconds on a CPU are of the process, on one thread.

Behind each ratio stand the tokens that theirs and ours run, padding included, and the bound of what can be gained with
the same answers: every beginning that the texts of the attack share run once, and of these tokens the matrix products
alone, as many at a time as ours runs at most.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import large
import numpy as np
import torch
from timing import SHAPES, classifier_on, machine, reader

import ssmscope
from ssmscope.attacks.prompts import prompt_attack
from ssmscope.attacks.words.measure import forks
from ssmscope.evaluation import Evaluator, Template, label_words, packed, running
from ssmscope.evaluation.encoded import token_rows
from ssmscope.evaluation.forking import Pieces, Rows, as_bytes
from ssmscope.model import Model
from ssmscope.tasks.prompts import CONTENT, content_of, prompts_of
from ssmscope.tasks.text import TextData, load_text

ATTACKS = ("stresstest", "checklist", "deepwordbug")
RECIPES = ("deepwordbug",)


def record(options: argparse.Namespace) -> None:
    """Attack the demos, and keep what is asked in a file."""
    data = load_text("sst2").sample(options.limit, seed=0)
    found: dict[str, Any] = {"words": prompts_of("sst2").words, "labels": list(data.labels)}
    found["contents"] = [content_of("sst2", text) for text in data.texts]
    found["prompts"] = {attack: asked_of_prompts(data, attack) for attack in ATTACKS}
    found["texts"] = {recipe: asked_of_texts(data, recipe) for recipe in RECIPES}
    options.file.write_text(json.dumps(found))


def asked_of_prompts(data: TextData, attack: str) -> list[tuple[list[str], list[int]]]:
    """The prompts that an attack tries and the examples that it fills in, in the waves in which ours asks about
    them."""
    template = f"{prompts_of('sst2').templates[0].partition(CONTENT)[0].rstrip()} {CONTENT}\nAnswer"
    rows = {content_of("sst2", text): row for row, text in enumerate(data.texts)}
    waves: list[tuple[list[str], list[int]]] = []
    grid = Evaluator.grid

    def noted(self: Evaluator, templates: Sequence[Template], contents: Sequence[str]) -> np.ndarray:
        waves.append(([each.text for each in templates], [rows[content] for content in contents]))
        return grid(self, templates, contents)

    with patch.object(Evaluator, "grid", noted):
        prompt_attack(ssmscope.load("demo/instruct-mamba2"), data, attacks=(attack,), template=template)
    return waves


def asked_of_texts(data: TextData, recipe: str) -> dict[str, list[list[str]]]:
    """The texts that an attack tries, in the waves in which ours asks about them, and in TextAttack's batches."""
    import words

    model = ssmscope.load("demo/sst2-mamba2")
    waves: list[list[str]] = []
    batches: list[list[str]] = []
    scores = Evaluator.scores

    def noted(self: Evaluator, texts: Sequence[str]) -> np.ndarray:
        waves.append(list(texts))
        return scores(self, texts)

    def read(texts: list[str], **how: Any) -> Any:
        batches.append(list(texts))
        return model.tokenizer(texts, **how)

    with patch.object(Evaluator, "scores", noted):
        words.ours(model, data, len(data), recipe, {})
    words.theirs(Model(model.module, read, model.name), data, list(range(len(data))), recipe, {})
    return {"ours": waves, "theirs": batches}


def clock() -> float:
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def sampled(run: Callable[[Any], int], work: Sequence[Any], seconds: float) -> tuple[int, float]:
    """How much of some work was done in about so many seconds, spread evenly over it, and how long that took."""
    order = np.random.default_rng(0).permutation(len(work))
    done, start = 0, clock()
    for each in order:
        done += run(work[each])
        if clock() - start > seconds:
            break
    return done, clock() - start


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many tokens each batch has that ours runs, padding included where it stands in products."""
    tokens: list[int] = []
    run_batch, run_packed = running.run_batch, packed.run_packed

    def noted(model: Model, ids: np.ndarray, *given: Any, **how: Any) -> Any:
        tokens.append(ids.size)
        return run_batch(model, ids, *given, **how)

    def noted_packed(model: Model, rows: Rows, pieces: Pieces, read: running.Read) -> None:
        tokens.append(pieces.tokens)
        run_packed(model, rows, pieces, read)

    with patch.object(running, "run_batch", noted), patch.object(packed, "run_packed", noted_packed):
        yield tokens


@torch.no_grad()
def kernels_of_theirs(model: Model) -> str:
    """Which optional kernels transformers' own layers run on a GPU."""
    from torch.profiler import ProfilerActivity, profile

    ids = torch.ones(1, 16, dtype=torch.long, device=model.device)
    model.module(ids, use_cache=False)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        model.module(ids, use_cache=False)
        torch.cuda.synchronize()
    known = {"selective_scan_fwd": "mamba_ssm's scan", "chunk_scan_fwd": "mamba_ssm's chunks"}
    known["causal_conv1d"] = "causal_conv1d"
    ran = [name for part, name in known.items() if any(part in event.key for event in seen.key_averages())]
    return ", ".join(ran) or "none: its reference loops"


def fewest(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens some texts have where they differ: what they begin with alike counts once."""
    distinct = Rows.of(sorted(set(as_bytes(rows))))
    return int((distinct.lengths - distinct.shared()).sum())


def products_alone(model: Model) -> float:
    """Seconds a token of the layers' matrix products, of as many tokens as are run together."""
    number = running.tokens_together(model)
    layers = [part for mixer in model.mixers for part in mixer.modules() if type(part) is torch.nn.Linear]
    inputs = {width: layers[0].weight.new_ones(number, width) for width in {part.in_features for part in layers}}

    def run() -> None:
        with torch.no_grad():
            for part in layers:
                torch.nn.functional.linear(inputs[part.in_features], part.weight)
        if model.device.type == "cuda":
            torch.cuda.synchronize()

    return min(timed(run, model)[0] for _ in range(3)) / number


def prompts(model: Model, found: dict[str, Any], waves: list[tuple[list[str], list[int]]], seconds: float) -> str:
    """An attack on prompts by both."""
    labels, contents = np.array(found["labels"]), found["contents"]
    right: dict[tuple[str, int], bool] = {}

    def ours() -> Evaluator:
        evaluator = Evaluator(model, words=found["words"])
        for prompts, rows in waves:
            evaluator.grid([Template(prompt) for prompt in prompts], [contents[row] for row in rows])
        return evaluator

    @torch.no_grad()
    def one(place: tuple[str, int]) -> int:
        prompt, row = place
        ids = [each[0] for each in label_words(model, found["words"], after=prompt[prompt.find(CONTENT) :]).ids]
        tokens = model.tokenizer(prompt.replace(CONTENT, contents[row]), return_tensors="pt")["input_ids"]
        logits = model.module(tokens.to(model.device), use_cache=False).logits[0, -1]
        right[place] = int(logits[ids].argmax()) == labels[row]
        return 1

    def filled(places: Sequence[tuple[str, int]]) -> list[str]:
        return [prompt.replace(CONTENT, contents[row]) for prompt, row in places]

    places = [
        (prompt, row) for prompt in {prompt: 0 for some, _ in waves for prompt in some} for row in range(len(labels))
    ]
    asked = [(prompt, row) for prompts, rows in waves for prompt in prompts for row in rows]
    with counted() as tokens:
        taken, evaluator = timed(ours, model)
    one(places[0])
    theirs = sampled(one, places, seconds)
    both = sorted(right.keys() & set(asked))
    answers = evaluator.answers(evaluator.scores(filled(both)))
    same = np.mean([(answer == labels[row]) == right[prompt, row] for answer, (prompt, row) in zip(answers, both)])
    run = sum(map(len, token_rows(model, filled(places))))
    least = fewest(token_rows(model, filled(asked)))
    return (
        told(model, len(places), taken, *theirs, run, sum(tokens), least)
        + f"; ours asks {len(set(asked)):,}, {same:.1%} of {len(both)} answers the same"
    )


def texts(model: Model, waves: list[list[str]], batches: list[list[str]], seconds: float) -> str:
    """An attack on texts by both."""
    logits: dict[str, np.ndarray] = {}

    def ours() -> Evaluator:
        evaluator = Evaluator(model, fork=forks(model, waves[0]))
        for wave in waves:
            evaluator.scores(wave)
        return evaluator

    @torch.no_grad()
    def batch(texts: Sequence[str]) -> int:
        each = model.tokenizer(list(texts), padding=True, return_tensors="pt").to(model.device)
        found = model.module(input_ids=each["input_ids"], attention_mask=each["attention_mask"]).logits
        logits.update(zip(texts, found.float().cpu().numpy()))
        return len(texts)

    with counted() as tokens:
        taken, evaluator = timed(ours, model)
    batch(batches[0])
    theirs = sampled(batch, batches, seconds)
    apart = np.abs(evaluator.scores(list(logits)) - np.array(list(logits.values()))).max()
    run = sum(len(batch) * max(map(len, token_rows(model, batch))) for batch in batches)
    least = fewest(token_rows(model, [text for wave in waves for text in wave]))
    number = sum(map(len, batches))
    return told(model, number, taken, *theirs, run, sum(tokens), least) + f"; logits at most {apart:.1e} apart"


def timed(run: Callable[[], Any], model: Model) -> tuple[float, Any]:
    """Seconds of a run, the second where kernels are compiled first, and what it returns."""
    if model.device.type == "cuda":
        run()
    start = clock()
    found = run()
    return clock() - start, found


def told(model: Model, number: int, taken: float, sampled: int, slow: float, run: int, ran: int, least: int) -> str:
    ran //= 2 if model.device.type == "cuda" else 1  # which ran twice
    rates = number / taken, sampled / slow
    bound = number / (least * products_alone(model)) / rates[1]
    return (
        f"ours {number:,} in {taken:.2f} s ({rates[0]:,.1f} a second), theirs {sampled:,} of them in {slow:.1f} s "
        f"({rates[1]:,.1f} a second): {rates[0] / rates[1]:.1f}x; tokens {run:,} by theirs, {ran:,} by ours "
        f"({run / ran:.2f}x), {least:,} at least ({run / least:.2f}x), whose products alone would be {bound:.1f}x"
    )


def replay(options: argparse.Namespace) -> None:
    """Ask what is in a file of a random model."""
    found = json.loads(options.file.read_text())
    if options.shape in SHAPES:
        model = reader(options.shape)
    else:
        tokenizer = ssmscope.load("demo/instruct-mamba2").tokenizer
        dtype = getattr(torch, options.dtype)
        model = ssmscope.load(large.built(options.shape, dtype, options.device).module, tokenizer=tokenizer)
    where = torch.cuda.get_device_name() if options.device == "cuda" else machine()
    print(f"{options.shape}, {options.dtype}, {where}, torch {torch.__version__}", flush=True)
    if options.device == "cuda":
        print("kernels of transformers' own layers:", kernels_of_theirs(model), flush=True)
    for attack, waves in found["prompts"].items():
        print(f"{attack} on a prompt:", prompts(model, found, waves, options.seconds), flush=True)
    model = ssmscope.load(classifier_on(model.module), tokenizer=model.tokenizer)
    for recipe, asked in found["texts"].items():
        print(f"{recipe} on texts:", texts(model, asked["ours"], asked["theirs"], options.seconds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for function in (record, replay):
        verb = verbs.add_parser(function.__name__, help=function.__doc__)
        verb.set_defaults(run=function)
        verb.add_argument("file", type=Path)
        if function is record:
            verb.add_argument("--limit", type=int, default=60, help="examples")
    verb.add_argument("--shape", choices=(*SHAPES, *large.SHAPES), default="falcon")
    verb.add_argument("--device", default="cpu")
    verb.add_argument("--dtype", default="bfloat16")
    verb.add_argument("--seconds", type=float, default=5.0, help="of each of their loops")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.run(options)


if __name__ == "__main__":
    main()
