"""mamba_ssm's own models on a GPU: its fused forward and backward passes beside ours, both against float64 on the CPU.

    python benchmarks/fused.py                     # mamba-130m's and mamba2-130m's shapes, float32 and bfloat16
    python benchmarks/fused.py --layers 4 --length 256

`ssmscope.load` is given its `MambaLMHeadModel` with random weights, as the package initialises them. Each number is the
largest difference relative to the largest value: of logits of two texts; of survival of every layer; of the implicit
attention of the middle layer; of relevance and gradient × input of the last logit that float64 has highest, on shorter
texts, "fused" by the package's own backward pass. Needs mamba_ssm and causal_conv1d as compiled.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ssmscope
from ssmscope.interp.methods.gradients import gradxinput
from ssmscope.interp.methods.lrp import lrp
from ssmscope.interp.objective import objective
from ssmscope.model import Model

KINDS: dict[str, dict[str, Any]] = {"Mamba": {"layer": "Mamba1"}, "Mamba-2": {"layer": "Mamba2"}}


def built(kind: str, layers: int, dtype: torch.dtype, device: str) -> Any:
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    torch.manual_seed(0)
    config = MambaConfig(d_model=768, n_layer=layers, vocab_size=50277, ssm_cfg=dict(KINDS[kind]))
    return MambaLMHeadModel(config, device=device, dtype=dtype).eval().requires_grad_(False)


def fused_layers(theirs: Any) -> int:
    """In how many layers the package takes its fused path."""
    from mamba_ssm.modules import mamba2, mamba_simple

    def fused(mixer: Any) -> bool:
        if isinstance(mixer, mamba2.Mamba2):
            return bool(mixer.use_mem_eff_path)
        return bool(mixer.use_fast_path) and mamba_simple.causal_conv1d_fn is not None

    return sum(fused(layer.mixer) for layer in theirs.backbone.layers)


def fused_gradient(theirs: Any, ids: Tensor, target: int) -> Tensor:
    """Gradient × input of a logit at the last position, by the package's own backward pass, (length,)."""
    kept: list[Tensor] = []

    def keep(module: Any, given: Any, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[0]

    hook = theirs.backbone.embedding.register_forward_hook(keep)
    try:
        (gradient,) = torch.autograd.grad(theirs(ids).logits[0, -1, target], kept)
    finally:
        hook.remove()
    return (gradient.double() * kept[0].double()).sum(-1)[0].detach()


def apart(found: Tensor, exact: Tensor) -> str:
    return f"{((found.detach().double().cpu() - exact).abs().max() / exact.abs().max()).item():.1e}"


def survival(model: Model, ids: list[int]) -> Tensor:
    heatmap = ssmscope.selection_heatmap(model, model.encode(ids=ids))
    return torch.stack([torch.from_numpy(text.scores) for text in heatmap]).double()


def attention(model: Model, ids: list[int]) -> Tensor:
    middle = model.num_layers // 2
    trace = model.trace(model.encode(ids=ids), keep_inputs=[middle])
    return trace.frozen[middle].attention("block").double()


def timed(seconds: dict[str, float], name: str, ask: Callable[[], Tensor]) -> Tensor:
    """The answer to a question that was asked twice; `seconds` gets those of the second time."""
    for _ in range(2):
        start = time.perf_counter()
        found = ask().cpu()
        seconds[name] = time.perf_counter() - start
    return found


def rows(kind: str, dtype: torch.dtype, options: argparse.Namespace) -> None:
    theirs = built(kind, options.layers, dtype, options.device)
    model = ssmscope.load(theirs)
    exact = ssmscope.load(theirs, dtype="float64", device="cpu")
    drawn = torch.Generator().manual_seed(1)
    texts = torch.randint(5, model.vocabulary, (2, options.length), generator=drawn)
    short, ids = texts[0, : options.length // 4].tolist(), texts[0, : options.length // 2].tolist()
    said = {"model": kind, "dtype": str(dtype).removeprefix("torch."), "fused layers": str(fused_layers(theirs))}
    seconds: dict[str, float] = {}

    given = texts.to(options.device)
    fused = timed(seconds, "fused", torch.no_grad()(lambda: theirs(given).logits))
    ours = timed(seconds, "ours", lambda: model.logits(model.encode(ids=texts.tolist())))
    reference = exact.logits(exact.encode(ids=texts.tolist()))
    said["logits, fused"], said["logits, ours"] = apart(fused, reference), apart(ours, reference)
    said["ours − fused"] = apart(ours, fused.double())
    best = [found.double().cpu().argmax(-1) for found in (fused, ours, reference)]
    for name, found in zip(("fused", "ours"), best, strict=False):
        said[f"same next token, {name}"] = f"{(found == best[-1]).double().mean().item():.4f}"
    for name, ask in (("heatmap", survival), ("attention", attention)):
        said[name] = apart(timed(seconds, name, lambda: ask(model, ids)), ask(exact, ids))  # noqa: B023

    wanted = objective(exact, exact.encode(ids=short))
    target = wanted.targets[0][0]
    asked = objective(model, model.encode(ids=short), target=target)
    for name, method in (("lrp", lrp), ("gradxinput", gradxinput)):
        expected = method(wanted).scores
        said[name] = apart(timed(seconds, name, lambda: method(asked).scores), expected)  # noqa: B023
        if name == "lrp":
            said["relevance, missing"] = f"{float(lrp(asked).delta[0]):.1e}"
    by_package = timed(
        seconds, "fused gradient", lambda: fused_gradient(theirs, torch.tensor([short], device=options.device), target)
    )
    said["gradxinput, fused"] = apart(by_package, expected[0])
    for name, value in said.items():
        print(f"| {name} | {value} |" + (f" {seconds[name]:.4f} s |" if name in seconds else " |"), flush=True)
    print(f"| seconds | fused {seconds['fused']:.4f}, ours {seconds['ours']:.4f} | |\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--length", type=int, default=512, help="tokens of each text; gradients are of a quarter")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    options = parser.parse_args()
    import causal_conv1d
    import mamba_ssm

    peers = f"mamba_ssm {mamba_ssm.__version__}, causal_conv1d {causal_conv1d.__version__}"
    card = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"{card}, torch {torch.__version__}, {peers}, {options.layers} layers, {options.length} tokens\n", flush=True)
    for kind in options.kinds:
        for dtype in options.dtypes:
            rows(kind, getattr(torch, dtype), options)


if __name__ == "__main__":
    main()
