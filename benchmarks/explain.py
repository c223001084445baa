"""Integrated Gradients of ours against captum's on transformers' own slow path, on a CPU.

    python benchmarks/explain.py             # about five minutes; captum with 2 steps, extrapolated
    python benchmarks/explain.py --full      # captum with all its steps: hours

A Mamba-1 of mamba-130m's shape, one text of 256 tokens, 50 steps, the logit of a next token. Both are measured in the
same run. A step of captum's is one forward and backward pass and costs the same as any other, so that the time of few
is extrapolated to all in proportion. Ours runs before and after captum's, so that a drift of the machine is seen. With
as many steps each, the scores of both are compared.
"""

from __future__ import annotations

import argparse
import time

import torch
from timing import THREADS, machine, mamba_130m, relative

import ssmscope
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.methods.integrated import ig
from ssmscope.interp.objective import Objective, objective


def ours(found: Objective, steps: int) -> tuple[float, torch.Tensor]:
    """Seconds, and the scores."""
    start = time.perf_counter()
    scores = ig(found, steps=steps, cap=steps).scores[0]
    return time.perf_counter() - start, scores


def captums(found: Objective, steps: int, at_once: int) -> tuple[float, torch.Tensor]:
    """The same by captum through the library's own forward pass, with weights that ask for no gradient, as ours."""
    from captum.attr import IntegratedGradients

    module, target = found.model.module, found.targets[0][0]

    def f(embeddings: torch.Tensor) -> torch.Tensor:
        hidden = module.base_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        return module.get_output_embeddings()(hidden[:, -1])[:, target]

    e, baseline = found.embeddings(), baseline_embeddings(found)
    asking = list(module.parameters())
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        start = time.perf_counter()
        scores = IntegratedGradients(f).attribute(
            e, baseline, n_steps=steps, method="gausslegendre", internal_batch_size=at_once
        )
        return time.perf_counter() - start, scores.sum(-1)[0].detach()
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--captum-steps", type=int, default=2, help="how many of captum's steps are run")
    parser.add_argument("--captum-at-once", type=int, default=1, help="how many of captum's steps are run together")
    parser.add_argument("--full", action="store_true", help="run all of captum's steps, nothing extrapolated")
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    model = ssmscope.load(mamba_130m())
    ids = torch.randint(0, 1000, (options.length,), generator=torch.Generator().manual_seed(0)).tolist()
    found = objective(model, model.encode(ids=ids))
    run = options.steps if options.full else options.captum_steps

    ours(found, 1)
    mine, scores = ours(found, options.steps)
    print(f"ours, {options.steps} steps: {mine:.2f} s", flush=True)
    theirs, expected = captums(found, run, options.captum_at_once)
    again, _ = ours(found, options.steps)
    print(f"ours again: {again:.2f} s", flush=True)
    total = theirs * options.steps / run
    how = "measured" if run == options.steps else f"extrapolated from {run} steps in {theirs:.2f} s"
    print(f"captum on the slow path, {options.steps} steps: {total:.1f} s ({how})")
    print(f"ratio: {total / max(mine, again):.1f}x of the slower of our two runs")
    same = scores if run == options.steps else ours(found, run)[1]
    print(f"relative difference of the scores with {run} steps each: {relative(same, expected):.1e}")


if __name__ == "__main__":
    main()
