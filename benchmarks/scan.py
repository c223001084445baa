"""Our scan against transformers' own slow path, on a Mamba-1 of mamba-130m's shape, on a CPU.

    python benchmarks/scan.py            # about six minutes, most of them transformers' backward pass
    python benchmarks/scan.py --skip-long-backward

Both are measured in the same run; logits and gradients are compared.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from timing import THREADS, machine, mamba_130m, relative, seconds

import ssmscope.models  # noqa: F401  (makes the mixers readable)
from ssmscope.model import fast_scan


def row(what: str, ours: float, theirs: float, error: float) -> None:
    print(f"{what:<42} {ours:>9.3f} {theirs:>12.3f} {theirs / ours:>8.1f}x {error:>12.1e}", flush=True)


def forward(model: torch.nn.Module, length: int, repeats: int) -> None:
    ids = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(length))

    def run(context):
        with torch.no_grad(), context:
            return model(ids, use_cache=False).logits

    error = relative(run(fast_scan(model)), run(nullcontext()))
    ours = seconds(lambda: run(fast_scan(model)), repeats)
    theirs = seconds(lambda: run(nullcontext()), repeats)
    row(f"forward, 24 layers, L = {length}", ours, theirs, error)


def backward(model: torch.nn.Module, length: int, repeats: int, what: str) -> None:
    embeds = torch.randn(1, length, 768, generator=torch.Generator().manual_seed(length))
    weights = torch.randn(1, length, 1000, generator=torch.Generator().manual_seed(length + 1))
    parameters = list(model.parameters())

    def run(context):
        inputs = embeds.clone().requires_grad_()
        with context:
            loss = (model(inputs_embeds=inputs, use_cache=False).logits * weights).mean()
            return torch.autograd.grad(loss, [inputs, *parameters])

    ours_gradients, theirs_gradients = run(fast_scan(model)), None

    def theirs_run():
        nonlocal theirs_gradients
        theirs_gradients = run(nullcontext())

    ours = seconds(lambda: run(fast_scan(model)), repeats)
    theirs = seconds(theirs_run, 1, warm_up=0)
    error = max(relative(a, b) for a, b in zip(ours_gradients, theirs_gradients, strict=True) if b.norm() > 0)
    row(what, ours, theirs, error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-long-backward", action="store_true", help="leave out the layer's backward at L = 1024")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    print(machine())
    print(f"{'':<42} {'ours (s)':>9} {'library (s)':>12} {'ratio':>9} {'rel. error':>12}")
    model = mamba_130m()
    forward(model, 256, options.repeats)
    forward(model, 1024, options.repeats)
    backward(model, 256, options.repeats, "forward + backward, 24 layers, L = 256")
    if not options.skip_long_backward:
        backward(mamba_130m(layers=1), 1024, options.repeats, "forward + backward, 1 layer, L = 1024")


if __name__ == "__main__":
    main()
