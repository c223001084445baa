"""Our scans against transformers' own slow path, on a Mamba-1 of mamba-130m's shape and on a Mamba-2 of mamba2-130m's,
on a CPU.

    python benchmarks/scan.py            # about three minutes, most of them transformers' backward pass
    python benchmarks/scan.py --mamba2   # Mamba-2 alone, without gradients
    python benchmarks/scan.py --skip-long-backward

Both are measured in the same run; logits and gradients are compared.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from timing import THREADS, machine, mamba2_130m, mamba_130m, relative, seconds

import ssmscope.models  # noqa: F401  (makes the mixers readable)
from ssmscope.mixers import fast_scan, mixers


def row(what: str, ours: float, theirs: float, error: float) -> None:
    print(f"{what:<42} {ours:>9.3f} {theirs:>12.3f} {theirs / ours:>8.1f}x {error:>12.1e}", flush=True)


def forward(
    model: torch.nn.Module,
    length: int,
    repeats: int,
    what: str = "forward, 24 layers",
    *,
    theirs_repeated: int | None = None,
) -> None:
    ids = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(length))

    def run(context):
        with torch.no_grad(), context:
            return model(ids, use_cache=False).logits

    error = relative(run(fast_scan(model)), run(nullcontext()))
    ours = seconds(lambda: run(fast_scan(model)), repeats)
    theirs = seconds(lambda: run(nullcontext()), theirs_repeated or repeats)
    row(f"{what}, L = {length}", ours, theirs, error)


def backward(
    model: torch.nn.Module, length: int, repeats: int, what: str, *, layer_only: bool = False, weights_too: bool = True
) -> None:
    """Forward and backward: gradients of the embeddings, and of every weight; of the first mixer with `layer_only`."""
    part = mixers(model)[0] if layer_only else model
    width = model.config.hidden_size
    draw = torch.Generator().manual_seed(length)
    embeds = torch.randn(1, length, width, generator=draw)
    weights = torch.randn(1, length, width if layer_only else model.config.vocab_size, generator=draw)
    parameters = list(part.parameters()) if weights_too else []

    def run(context):
        inputs = embeds.clone().requires_grad_()
        with context:
            output = part(inputs) if layer_only else part(inputs_embeds=inputs, use_cache=False).logits
            return torch.autograd.grad((output * weights).mean(), [inputs, *parameters])

    found = run(fast_scan(model))
    ours = seconds(lambda: run(fast_scan(model)), repeats)
    expected = []
    theirs = seconds(lambda: expected.extend(run(nullcontext())), 1, warm_up=0)
    error = max(relative(a, b) for a, b in zip(found, expected, strict=True) if b.norm() > 0)
    row(what, ours, theirs, error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-long-backward", action="store_true", help="leave out the layer's backward at L = 1024")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mamba2", action="store_true", help="Mamba-2 alone")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    print(machine())
    print(f"{'':<42} {'ours (s)':>9} {'library (s)':>12} {'ratio':>9} {'rel. error':>12}")
    model = mamba2_130m(layers=4)  # transformers needs 20 s for these at L = 1024
    for length in (256, 1024):
        forward(model, length, options.repeats, "Mamba-2: forward, 4 layers", theirs_repeated=1)
    if options.mamba2:
        return
    model = mamba_130m()
    forward(model, 256, options.repeats)
    forward(model, 1024, options.repeats)
    backward(model, 256, options.repeats, "forward + backward, 24 layers, L = 256")
    backward(model, 256, options.repeats, "  gradients of the inputs alone", weights_too=False)
    if not options.skip_long_backward:
        backward(mamba_130m(layers=1), 1024, options.repeats, "forward + backward, 1 layer, L = 1024", layer_only=True)
        # The same 1536 channels between projections of width 1: the scan without the products that both share.
        narrow = mamba_130m(layers=1, width=1, expand=1536, vocabulary=1)
        backward(narrow, 1024, options.repeats, "  its selective scan alone", layer_only=True)


if __name__ == "__main__":
    main()
