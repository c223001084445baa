"""Time writing: tokens a second beside transformers' own `generate` with its cache, and seconds a token as texts grow.

    python benchmarks/generation.py                                     # a CPU: mamba-130m's and mamba2-130m's shape
    python benchmarks/generation.py --device cuda --shapes falcon codestral --dtype bfloat16
    python benchmarks/generation.py --lengths 16384 --shapes mamba2-130m --json runs/lengths.jsonl

Both write the same number of tokens after the same prompts, in turns and in one process, after a call of each that is
not counted; the table has medians. With --lengths one text is written up to so many tokens, and every doubling of its
length is a line: the seconds of a token there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES
from timing import THREADS, machine

import ssmscope

VOCABULARY = 50280
PROMPT = 16


def model_of(shape: str, options: argparse.Namespace) -> Any:
    """A random model of a shape, with a whole vocabulary where the shape has a small one."""
    kind, config = SHAPES[shape]()
    config.vocab_size = max(config.vocab_size, VOCABULARY)
    if hasattr(config, "chunk_size"):
        config.chunk_size = 32  # By default transformers pads a prompt to 256 tokens.
    torch.manual_seed(0)
    with torch.device(options.device):
        torch.set_default_dtype(getattr(torch, options.dtype))
        module = kind(config).eval()
        torch.set_default_dtype(torch.float32)
    module.generation_config.eos_token_id = None
    return module


def ways(module: Any, prompts: torch.Tensor, new: int) -> dict[str, Callable[[], Any]]:
    """Calls that write `new` tokens after each prompt."""
    model = ssmscope.load(module)
    batch, mask = model.encode(ids=prompts.tolist()), torch.ones_like(prompts)

    def theirs() -> Any:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return module.generate(prompts, attention_mask=mask, **options)[:, prompts.shape[1] :]

    return {"ssmscope": lambda: model.generate(batch, max_new_tokens=new).ids, "transformers": theirs}


def seconds(run: Callable[[], Any]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def rates(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tokens a second, for each shape and batch."""
    for shape in options.shapes:
        module = model_of(shape, options)
        for rows in options.batches:
            prompts = torch.randint(1, 1000, (rows, PROMPT), device=options.device)
            calls = ways(module, prompts, options.new)
            agree = torch.tensor(calls["ssmscope"]()).eq(calls["transformers"]().cpu()).float().mean().item()
            spent: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(options.repeats):
                for name, call in calls.items():
                    spent[name].append(seconds(call))
            found = {name: rows * options.new / statistics.median(each) for name, each in spent.items()}
            yield {"shape": shape, "rows": rows, "tokens a second": found, "same tokens": agree, "seconds": spent}


def lengths(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds a token of one text, at each doubling of its length."""
    for shape in options.shapes:
        model = ssmscope.load(model_of(shape, options))
        begun, ends = time.perf_counter(), 2 * PROMPT
        new = options.lengths - PROMPT
        started = PROMPT
        for step in model.generate_stream(ids=[list(range(1, PROMPT + 1))], max_new_tokens=new):
            written = PROMPT + step.number + 1
            if written == ends or written == options.lengths:
                now = time.perf_counter()
                yield {"shape": shape, "length": written, "seconds a token": (now - begun) / (written - started)}
                begun, started, ends = now, written, 2 * ends


def shown(line: dict[str, Any]) -> str:
    if "length" in line:
        return f"| {line['shape']} | {line['length']:,} | {1000 * line['seconds a token']:.2f} |"
    rates = line["tokens a second"]
    same = f"{line['same tokens']:.3f}"
    return f"| {line['shape']} | {line['rows']} | {rates['ssmscope']:.1f} | {rates['transformers']:.1f} | {same} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shapes", nargs="+", default=["mamba-130m", "mamba2-130m"], choices=SHAPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--new", type=int, default=64, help="Tokens written after each prompt.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=int, help="Length up to which one text is written.")
    parser.add_argument("--json", type=Path, help="File to which every measurement is added as a line.")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    device = torch.cuda.get_device_name() if options.device == "cuda" else machine()
    head = ("length", "ms a token") if options.lengths else ("rows", "ssmscope", "transformers", "same tokens")
    print(f"{device}, {options.dtype}\n\n| shape | {' | '.join(head)} |\n|{'---|' * (len(head) + 1)}", flush=True)
    for line in (lengths if options.lengths else rates)(options):
        print(shown(line), flush=True)
        if options.json:
            with options.json.open("a") as lines:
                lines.write(json.dumps({**line, "device": device, "dtype": options.dtype}) + "\n")


if __name__ == "__main__":
    main()
