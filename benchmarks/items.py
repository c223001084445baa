"""Items that waiting.py times, and their peers."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import torch
from shapes import built
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
IG_GRADIENTS, PEER_GRADIENTS = 50, 2
CLASSIFIERS = ("demo/sst2-mamba", "demo/sst2-mamba2")
PEER_TEXTS = 12  # of the 60 texts of fidelity; like the peer's gradients, so that its minutes are few
SENTENCE = "A gripping, beautifully acted film that never quite finds the ending that it deserves."


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

    def item(name: str, what: str, *sides: Any, first: bool = False) -> Item:
        return Item(name, f"{shape}: {what}, {lengths[name]:,} tokens", *sides, first=first)

    heatmap = lambda: ssmscope.heatmap(model, batches["heatmap"])  # noqa: E731
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
    bare = lambda: trace().linearized[layer].attention("ssm", skip=False)  # noqa: E731
    pairs = lambda: peers.attention_pairs(trace().layers[layer].recurrence)  # noqa: E731
    yield item("attention", "attention map of a layer's recurrence", bare, "all pairs in torch", pairs)
    yield item("attention", "attention map of a block", lambda: trace().linearized[layer].attention("block"))
    shown = lambda: ssmscope.attention(trace(), layers=[layer])  # noqa: E731
    yield item("attention", "`analyze attention` of a layer", shown)
    if "ig" in lengths:
        option = {"ig": {"steps": IG_GRADIENTS, "cap": IG_GRADIENTS}}
        path = dict(method="gausslegendre", n_steps=PEER_GRADIENTS)
        ours = lambda: explain(batches["ig"], methods=["ig"], option=option)  # noqa: E731
        theirs = lambda: scores(module, ids["ig"], "IntegratedGradients", **path)  # noqa: E731
        what = f"Integrated Gradients of {IG_GRADIENTS} gradients"
        peer = f"captum on transformers ({PEER_GRADIENTS} gradients, scaled)"
        yield item("ig", what, ours, peer, theirs, IG_GRADIENTS // PEER_GRADIENTS)


def of_demos() -> Iterator[Item]:
    """Fidelity of 60 texts, and an attack on the prompt."""
    from ssmscope.data.prompts import CONTENT, prompts_of
    from ssmscope.data.text import load_text

    data, methods = load_text("sst2").sample(60, seed=0), ("gradxinput", "gradcam", "survival")
    for name in CLASSIFIERS:
        model = ssmscope.load(name)
        ours = functools.partial(ssmscope.fidelity, model, data, methods=methods)
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
        ours = functools.partial(ssmscope.prompts, model, data, **arguments)
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


def items_of(setup: str, device: str) -> Iterator[Item]:
    """Items of a setup: the shape of a language model, or one of the named ones."""
    named = {"demos": of_demos, "training": functools.partial(of_training, device), "process": of_process}
    yield from named[setup]() if setup in named else of_language_model(setup, device)
