"""What a user waits for, each beside the peer that a user would take instead, in one run, as a Markdown table.

    SSMSCOPE_DATA=… python benchmarks/waiting.py                        # a CPU: models of mamba-130m's width, demos
    python benchmarks/waiting.py --device cuda                          # a GPU: models of 7 billion parameters
    python benchmarks/waiting.py --setups mamba-130m --items run heatmap --only ours --json runs/new.jsonl
    python benchmarks/waiting.py --compare runs/old.jsonl runs/new.jsonl

Ours and the peer take turns in one process, after a call of each that is not counted; the table has medians. A peer
that is called once (--peer-repeats 1) is not warmed up. The first call of a process is timed in a process of its own,
from the loaded model on; on a GPU with empty caches of compiled kernels, and again with those that this left. With
--json every item is a line with all its seconds, wall and CPU; `--compare` pools the lines of two such files. The
script uses what any version of the package has, so that PYTHONPATH chooses the version that is timed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import torch
from shapes import SHAPES, built
from timing import Seconds, machine

import ssmscope

LENGTHS = {
    "cpu": {"run": 512, "heatmap": 512, "gradxinput": 512, "lrp": 512, "attention": 512, "ig": 64},
    "cuda": {"run": 512, "heatmap": 8192, "gradxinput": 256, "lrp": 2048, "attention": 2048},
}
"""The tokens of each question."""
SETUPS = {
    "cpu": ("mamba-130m", "mamba2-130m", "demos", "training", "process"),
    "cuda": ("falcon", "codestral", "qwen", "training"),
}
IG_GRADIENTS = 50
CLASSIFIERS = ("demo/sst2-mamba", "demo/sst2-mamba2")
PEER_TEXTS = 12  # of the 60 texts of fidelity, so that the peer's minutes are few
SENTENCE = "A gripping, beautifully acted film that never quite finds the ending that it deserves."
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Item:
    """One thing that is waited for. `ours` and `theirs` may return the seconds that they timed themselves; the peer is
    given one of `parts` equal parts of the work. With `first` the first call of a process is timed too."""

    name: str
    what: str
    ours: Callable[[], Any]
    peer: str = "none"
    theirs: Callable[[], Any] | None = None
    parts: int = 1
    first: bool = False


def of_language_model(shape: str, device: str) -> Iterator[Item]:
    """Items of a random model: 6 layers in float32 on a CPU, all layers in bfloat16 on a GPU."""
    layers = {"cuda": 8 if shape == "qwen" else None, "cpu": 6}[device]
    model = built(shape, {"cuda": torch.bfloat16, "cpu": torch.float32}[device], device, layers)
    draw, lengths, module = torch.Generator().manual_seed(0), LENGTHS[device], model.module
    texts = {name: torch.randint(5, model.vocabulary, (1, n), generator=draw) for name, n in lengths.items()}
    batches = {name: model.encode(ids=ids[0].tolist()) for name, ids in texts.items()}
    ids = {name: each.to(device) for name, each in texts.items()}
    layer = model.num_layers // 2
    trace = functools.cache(lambda: model.trace(batches["attention"], keep_inputs=[layer]))

    def item(name: str, what: str, ours: Callable[[], Any], peer: str = "none", *rest: Any, first: bool = False) -> Item:
        return Item(name, f"{shape}: {what}, {lengths[name]:,} tokens", ours, peer, *rest, first=first)

    heatmap = lambda: ssmscope.selection_heatmap(model, batches["heatmap"])  # noqa: E731
    yield item("heatmap", "heatmap", heatmap, first=True)
    if shape == "qwen":
        return
    explain = functools.partial(ssmscope.explain, model)
    forward, scores = peers.forward, peers.captum_scores
    run = lambda: model.logits(batches["run"])  # noqa: E731
    yield item("run", "run", run, "transformers' forward", lambda: forward(module, ids["run"]), first=True)
    gradient = lambda: scores(module, ids["gradxinput"], "InputXGradient")  # noqa: E731
    ours = lambda: explain(batches["gradxinput"], methods=["gradxinput"])  # noqa: E731
    yield item("gradxinput", "gradient × input", ours, "captum on transformers", gradient)
    yield item("lrp", "LRP", lambda: explain(batches["lrp"], methods=["lrp"]))
    bare = lambda: trace().frozen[layer].attention("ssm", skip=False)  # noqa: E731
    pairs = lambda: peers.attention_pairs(trace().layers[layer].recurrence)  # noqa: E731
    yield item("attention", "attention map of a layer's recurrence", bare, "all pairs in torch", pairs)
    yield item("attention", "attention map of a block", lambda: trace().frozen[layer].attention("block"))
    shown = lambda: ssmscope.implicit_attention(trace(), layers=[layer])  # noqa: E731
    yield item("attention", "`analyze attention` of a layer", shown)
    if "ig" in lengths:
        option = {"ig": {"steps": IG_GRADIENTS, "cap": IG_GRADIENTS}}
        path = dict(method="gausslegendre", n_steps=IG_GRADIENTS, internal_batch_size=5)
        ours = lambda: explain(batches["ig"], methods=["ig"], option=option)  # noqa: E731
        theirs = lambda: scores(module, ids["ig"], "IntegratedGradients", **path)  # noqa: E731
        what = f"Integrated Gradients of {IG_GRADIENTS} gradients"
        yield item("ig", what, ours, "captum on transformers", theirs)


def of_demos() -> Iterator[Item]:
    """Fidelity of 60 texts, and an attack on the prompt."""
    from ssmscope.tasks.prompts import CONTENT, prompts_of
    from ssmscope.tasks.text import load_text

    data, methods = load_text("sst2").sample(60, seed=0), ("gradxinput", "gradcam", "survival")
    for name in CLASSIFIERS:
        model = ssmscope.load(name)
        ours = functools.partial(ssmscope.fidelity_auc, model, data, methods=methods)
        texts, rankings = data.texts[:PEER_TEXTS], len(methods) + 20  # ours compares with 20 random ones
        theirs = functools.partial(peers.fidelity_text_by_text, model, texts, rankings)
        peer = f"captum and transformers, text by text ({PEER_TEXTS} texts, scaled)"
        yield Item("fidelity", f"{name}: fidelity of 60 texts", ours, peer, theirs, len(data) // PEER_TEXTS)
    model, known = ssmscope.load("demo/instruct-mamba2"), prompts_of("sst2")
    # ends in a word: PromptBench puts suffixes before the last punctuation
    prompt = f"{known.templates[0].partition(CONTENT)[0].rstrip()} {CONTENT}\nAnswer"
    evaluate = peers.OneByOne(model, data, known.words)
    for attack in ("deepwordbug", "checklist"):
        arguments = dict(attacks=(attack,), template=prompt, seed=0, progress=False)
        ours = functools.partial(ssmscope.prompt_attack, model, data, **arguments)
        theirs = functools.partial(peers.promptbench, attack, prompt, evaluate)
        what = f"demo/instruct-mamba2: {attack} on a prompt, 60 texts"
        yield Item("prompts", what, ours, "PromptBench on transformers", theirs)


def of_training(device: str) -> Iterator[Item]:
    """Steps of training: the recipe of SST-2 on a CPU; those of CIFAR-10 and of books, recorded, on a GPU."""
    if device == "cpu":
        draw, module = torch.Generator().manual_seed(0), copy.deepcopy(ssmscope.load("demo/sst2-mamba2").module).train()
        inputs = {"input_ids": torch.randint(5, 4000, (32, 64), generator=draw)}
        labels = torch.randint(2, (32,), generator=draw)
        plain = functools.partial(peers.training_step, module, inputs, labels)

        def ours() -> None:
            with ssmscope.fast_scan(module):
                plain()

        what = "gradients of a Mamba-2 classifier, 32 × 64 tokens (recipe of SST-2)"
        yield Item("training", what, ours, "transformers' forward, backward", plain)
        return
    from training_steps import of_books, of_cifar10

    for what, (trained, plain) in {"Baleen-E of CIFAR-10": of_cifar10(), "Mamba-2 of books": of_books()}.items():
        yield Item("training", f"a step of {what}, batch 64", trained, "Mamba-2 of transformers", plain)


def of_process() -> Iterator[Item]:
    """A whole command, from its start to its end."""
    heatmap = [sys.executable, "-m", "ssmscope", "heatmap", "demo/sst2-mamba2", "--text", SENTENCE]
    folder = Path(ssmscope.__file__).parent / "demo" / "instruct-mamba2"
    code = (
        f"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; f = {str(folder)!r}; "
        f"M.from_pretrained(f)(**T.from_pretrained(f)({SENTENCE!r}, return_tensors='pt'))"
    )
    started = functools.partial(subprocess.run, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    theirs = functools.partial(started, [sys.executable, "-c", code])
    what = "the command `analyze heatmap demo/sst2-mamba2 --text …`"
    yield Item("process", what, lambda: started(heatmap), "loading and a forward by transformers", theirs)


def items(options: argparse.Namespace) -> Iterator[tuple[str, Item]]:
    for setup in options.setups or SETUPS[options.device]:
        special = {"demos": of_demos, "training": lambda: of_training(options.device), "process": of_process}
        found = special[setup]() if setup in special else of_language_model(setup, options.device)
        yield from ((setup, item) for item in found if not options.items or item.name in options.items)


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of a call, or the seconds that it says."""
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronise()
    start, before = time.perf_counter(), cpu_seconds()
    said = run()
    synchronise()
    if isinstance(said, Seconds):
        return said, said
    return time.perf_counter() - start, cpu_seconds() - before


def cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def in_turn(item: Item, options: argparse.Namespace) -> dict[str, Any]:
    """All seconds of an item: ours and the peer's call by call in turn."""
    sides = {"ours": (item.ours, options.repeats), "theirs": (item.theirs, options.peer_repeats)}
    left = {"ours": ("ours",), "peer": ("theirs",)}.get(options.only, ("ours", "theirs"))
    sides = {side: (run, n) for side, (run, n) in sides.items() if side in left and run is not None and n}
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(-1, max((n for _, n in sides.values()), default=0)):
        for side, (run, n) in sides.items():
            if (number < 0 and (side == "ours" or n > 1)) or 0 <= number < n:
                seconds = timed(run)
                if number >= 0:
                    found[side].append(seconds)
    parts = {"ours": 1, "theirs": item.parts}
    return {side: [[part * parts[side] for part in pair] for pair in pairs] for side, pairs in found.items()}


def first_calls(setup: str, item: Item, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The first call of a process, in a process of its own."""
    wanted = ["--device", options.device, "--threads", str(options.threads), "--setups", setup, "--items", item.name]
    with tempfile.TemporaryDirectory() as folder:
        empty = {name: str(Path(folder, name)) for name in CACHES} if options.device == "cuda" else {}
        for said in ("empty caches", "warm caches") if empty else ("",):
            found: dict[str, Any] = {"what": ", ".join(filter(None, [f"{item.what}, first call of a process", said]))}
            for side in ("ours", "theirs"):
                if options.only in ("both", {"ours": "ours", "theirs": "peer"}[side]) and getattr(item, side):
                    command = [sys.executable, __file__, *wanted, "--first", side]
                    ran = subprocess.run(command, env={**os.environ, **empty}, stdout=subprocess.PIPE, check=True)
                    found[side] = [json.loads(ran.stdout.splitlines()[-1])]
            yield {**found, "peer": item.peer}


def shown(row: dict[str, Any], clock: int) -> str:
    ours, theirs = (statistics.median(each[clock] for each in row[s]) if row.get(s) else None for s in ("ours", "theirs"))
    ratio = f"{theirs / ours:.1f}" if ours and theirs else "–"
    cells = [f"{each:.3f} s" if each else "–" for each in (ours, theirs)]
    return f"| {row['what']} | {cells[0]} | {row['peer']} | {cells[1]} | {ratio} |"


def compare(files: Sequence[Path], clock: int) -> None:
    """The ratio of two files' medians, item by item, and their geometric mean."""
    pooled: list[dict[str, list[float]]] = []
    for file in files:
        pooled.append({})
        for row in map(json.loads, file.read_text().splitlines()):
            pooled[-1].setdefault(row["what"], []).extend(each[clock] for each in row.get("ours", []))
    old, new = ({what: statistics.median(seconds) for what, seconds in each.items() if seconds} for each in pooled)
    print(f"| what | {files[0].stem} | {files[1].stem} | ratio |\n|---|---|---|---|")
    ratios = {what: new[what] / old[what] for what in old if what in new}
    for what, ratio in ratios.items():
        print(f"| {what} | {old[what]:.3f} s | {new[what]:.3f} s | {ratio:.2f} |")
    print(f"| geometric mean | | | {statistics.geometric_mean(ratios.values()):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--setups", nargs="+", choices=[*SHAPES, "demos", "training", "process"])
    parser.add_argument("--items", nargs="+", help="run, heatmap, gradxinput, lrp, attention, ig, fidelity, prompts …")
    parser.add_argument("--only", choices=["both", "ours", "peer"], default="both")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-repeats", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="of the table")
    parser.add_argument("--no-first", action="store_true", help="leave out first calls")
    parser.add_argument("--json", type=Path, help="a file that gets a line an item")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--first", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    clock = ("wall", "cpu").index(options.clock)
    if options.compare:
        return compare(options.compare, clock)
    torch.set_num_threads(options.threads)
    if options.first:
        _, item = next(each for each in items(options) if each[1].first)
        return print(json.dumps(timed(getattr(item, options.first))))
    print(ssmscope.__file__, file=sys.stderr)
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if options.device == "cuda" else machine()
    print(f"{where}\n\n| what | ours | peer | peer's | ratio |\n|---|---|---|---|---|")
    for setup, item in items(options):
        rows = [{"what": item.what, "peer": item.peer, **in_turn(item, options)}]
        for row in [*rows, *(first_calls(setup, item, options) if item.first and not options.no_first else ())]:
            print(shown(row, clock), flush=True)
            if options.json:
                with options.json.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
