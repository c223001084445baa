"""Time writing: tokens a second beside transformers' own `generate` with its cache, and seconds a token as texts grow.

    python benchmarks/generation.py                                     # a CPU: mamba-130m's and mamba2-130m's shape
    python benchmarks/generation.py --device cuda --shapes falcon codestral --dtype bfloat16
    python benchmarks/generation.py --device cuda --mamba-ssm --shapes mamba-130m mamba2-130m mamba2-2.7b --new 128 512
                                                                        # and its own generation with a CUDA graph
    python benchmarks/generation.py --lengths 16384 --shapes baleen-e --layers 4 --json runs/lengths.jsonl
    python benchmarks/generation.py --device cuda --own mamba2 diff-mamba-hybrid diff-mamba --layers 48 --width 1024 \\
        --prompt 2048 --new 128 --batches 1 8 64                        # Differential Mamba, Figure 9

All write the same number of tokens after the same prompts, in turns and in one process, after a call of each that is
not counted and in which layers are compiled; the table has medians. Each is timed with one written token too, for the
rate of writing alone. With --own the models are the package's own types. With --lengths one text is written up to so
many tokens, and every doubling of its length is a line: the seconds of a token there. --draw FILE draws these from
benchmarks/results/generation.jsonl.
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
import transformers
from timing import THREADS, machine
import ssmscope
from ssmscope.zoo.training.architectures import OWN, Tokens
from ssmscope.zoo.training.build import language_model

VOCABULARY = 50280
WARM_UP_TOKENS = 8
FIGURE_PROMPT = 2048
"""Tokens of a prompt in Figure 9 of Differential Mamba."""
NAMES = ("ssmscope", "compiled", "transformers", "mamba_ssm")
RESULTS = Path(__file__).parent / "results" / "generation.jsonl"


def own_model(name: str, options: argparse.Namespace) -> Any:
    """Return a random model of one of the package's own types."""
    torch.manual_seed(0)
    state = 16 if name == "mamba" else 128
    sizes = dict(width=options.width, layers=options.layers or 24, state=state, head_width=64, expand=2, tied=True)
    given = {"architecture": name.removesuffix("-hybrid"), "base": "mamba2", **sizes}
    if name.endswith("-hybrid"):
        given["differential_layers"] = "hybrid"
    module = language_model({**dict.fromkeys((*OWN, "decays")), **given}, Tokens(VOCABULARY), None)
    return module.eval().requires_grad_(False).to(options.device, getattr(torch, options.dtype))


def model_of(shape: str, options: argparse.Namespace) -> Any:
    """Return a random model of a shape, with a whole vocabulary where the shape has a small one."""
    from shapes import SHAPES

    if shape not in SHAPES:
        return own_model(shape, options)  # Raises InputError for an unknown name.
    kind, config = SHAPES[shape]()
    config.vocab_size = max(config.vocab_size, VOCABULARY)
    config.num_hidden_layers = options.layers or config.num_hidden_layers
    config.initializer_range = 0.02
    if hasattr(config, "chunk_size"):
        config.chunk_size = 32  # By default transformers pads a prompt to 256 tokens.
    torch.manual_seed(0)
    with torch.device(options.device):
        module = kind._from_config(config, dtype=getattr(torch, options.dtype)).eval()
    module.requires_grad_(False).generation_config.eos_token_id = None
    return module


def model_of_mamba_ssm(shape: str, options: argparse.Namespace) -> Any:
    """Return a random model of mamba_ssm of a Mamba's or Mamba-2's shape; its kernels need a GPU."""
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
    from shapes import SHAPES

    _, config = SHAPES[shape]()
    layer = {"layer": {"mamba": "Mamba1", "mamba2": "Mamba2"}[config.model_type], "d_state": config.state_size}
    sizes = dict(d_model=config.hidden_size, n_layer=options.layers or config.num_hidden_layers, vocab_size=VOCABULARY)
    torch.manual_seed(0)
    found = MambaLMHeadModel(
        MambaConfig(**sizes, ssm_cfg=layer), device=options.device, dtype=getattr(torch, options.dtype)
    )
    return found.eval().requires_grad_(False)


def ways(module: Any, prompts: torch.Tensor, own: bool) -> dict[str, Callable[[int], Any]]:
    """Return calls that write so many tokens after each prompt."""
    model, given = ssmscope.load(module), module
    batch, mask = model.encode(ids=prompts.tolist()), torch.ones_like(prompts)
    module = model.module
    module.generation_config.eos_token_id = None

    def theirs(new: int) -> Any:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return module.generate(prompts, attention_mask=mask, **options)[:, prompts.shape[1] :].tolist()

    def ours(new: int) -> Any:
        return model.generate(batch, max_new_tokens=new, batch_size=len(prompts), compile=False).ids

    def compiled(new: int) -> Any:
        return model.generate(batch, max_new_tokens=new, batch_size=len(prompts), compile=True).ids

    def mamba_ssm(new: int) -> Any:
        return given.generate(prompts, max_length=prompts.shape[1] + new, cg=True)[:, prompts.shape[1] :].tolist()

    found = {"ssmscope": ours, "compiled": compiled}
    if given is not module:
        return {**found, "mamba_ssm": mamba_ssm}
    return found if own else {**found, "transformers": theirs}


def seconds(run: Callable[[], Any]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def rates(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield tokens a second, for each shape and batch, of the whole call and of the tokens after the first."""
    for shape in options.own or options.shapes:
        module = (model_of_mamba_ssm if options.mamba_ssm else model_of)(shape, options)
        for rows in options.batches:
            prompts = torch.randint(1, 1000, (rows, options.prompt), device=options.device)
            calls = ways(module, prompts, bool(options.own))
            warm = [torch.tensor(call(WARM_UP_TOKENS)) for call in calls.values()]
            same = [warm[0].eq(each).float().mean().item() for each in warm]
            spent: dict[str, dict[int, list[float]]] = {name: {1: [], **{n: [] for n in options.new}} for name in calls}
            for _ in range(options.repeats):
                for name, call in calls.items():
                    for new, each in spent[name].items():
                        each.append(seconds(lambda: call(new)))  # noqa: B023
            for new in options.new:
                line = {"shape": shape, "rows": rows, "prompt": options.prompt, "new": new}
                for name, by_new in spent.items():
                    first, whole = (statistics.median(by_new[n]) for n in (1, new))
                    rate = {"whole": rows * new / whole, "writing": rows * (new - 1) / (whole - first)}
                    line[name] = {**rate, "first token": first, "seconds": [by_new[1], by_new[new]]}
                yield {**line, "same tokens": min(same)}
        del module, calls
        if options.device == "cuda":
            torch.cuda.empty_cache()


def lengths(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield seconds a token of one text, at each doubling of its length."""
    for shape in options.own or options.shapes:
        model = ssmscope.load(model_of(shape, options))
        prompt = [list(range(1, options.prompt + 1))]
        model.generate(ids=prompt, max_new_tokens=WARM_UP_TOKENS)
        started, ends = options.prompt + 1, 2 * options.prompt
        for step in model.generate_stream(ids=prompt, max_new_tokens=options.lengths - options.prompt):
            written = options.prompt + step.number + 1
            if written == started:
                begun = time.perf_counter()
            elif written in (ends, options.lengths):
                now = time.perf_counter()
                yield {"shape": shape, "length": written, "seconds a token": (now - begun) / (written - started)}
                begun, started, ends = now, written, 2 * ends


def draw(path: Path) -> None:
    """Draw the milliseconds of a token over the length of the text, a line for each type and device."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot()
    found = [line for line in map(json.loads, RESULTS.open()) if "length" in line]
    for shape, width, device in dict.fromkeys((line["shape"], line["width"], line["device"]) for line in found):
        lines = [line for line in found if (line["shape"], line["width"], line["device"]) == (shape, width, device)]
        times = [1000 * line["seconds a token"] for line in lines]
        label = f"{shape}, {lines[0]['layers']} layers of width {width}, {device.split(',')[0]}"
        axes.plot([line["length"] for line in lines], times, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the text")
    axes.set_ylabel("ms for each written token")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def docs_table(gpu: bool = False) -> list[str]:
    """Return the rows of a page's table: tokens a second of whole calls of both, and "—" where transformers did not
    finish in 30 seconds."""
    rows = ["|  | texts | ssmscope | transformers |", "|" + "---|" * 4]
    for line in map(json.loads, RESULTS.open()):
        if line.get("prompt", FIGURE_PROMPT) < FIGURE_PROMPT and ("NVIDIA" in line["device"]) == gpu and not peer(line):
            both = [rate_of(line.get(name), "whole") for name in ("ssmscope", "transformers")]
            rows.append(f"| {line['shape']} | {line['rows']} | {' | '.join(both)} |")
    return rows


def peer(line: dict[str, Any]) -> bool:
    return "mamba_ssm" in line


def peer_table() -> list[str]:
    """Return the rows of a page's table: tokens a second of whole calls beside mamba_ssm's, by texts and by how many
    are written."""
    names, found = ("ssmscope", "compiled", "mamba_ssm"), dict[str, dict[int, list[dict[str, Any]]]]()
    for line in filter(peer, map(json.loads, RESULTS.open())):
        found.setdefault(f"{line['shape']}, {line['dtype']}", {}).setdefault(line["rows"], []).append(line)
    first = next(iter(found.values()))
    new = "; ".join(str(line["new"]) for line in first[1])
    columns = ("{} texts", "`compile=True`", "mamba_ssm")
    head = " | ".join(name.format(texts) for texts in first for name in columns).replace("1 texts", "1 text", 1)
    rows = [f"| {new} tokens | {head} |", "|" + "---|" * (1 + 3 * len(first))]
    for what, by_texts in found.items():
        each = [(lines, name) for lines in by_texts.values() for name in names]
        cells = ("; ".join(rate_of(line[name], "whole") for line in lines) for lines, name in each)
        rows.append(f"| {what} | {' | '.join(cells)} |")
    return rows


def rate_of(found: dict[str, Any] | None, what: str) -> str:
    return "—" if found is None else f"{found[what]:.3g}" if found[what] < 1000 else f"{found[what]:,.0f}"


def gpu_table() -> list[str]:
    return docs_table(gpu=True)


def figure_table() -> list[str]:
    """Return the rows of a page's table of Figure 9: tokens a second of the whole call, by the number of texts."""
    rates: dict[int, list[str]] = {}
    for line in map(json.loads, RESULTS.open()):
        if line.get("prompt") == FIGURE_PROMPT:
            rates.setdefault(line["rows"], []).append(rate_of(line["ssmscope"], "whole"))
    rows = ["| texts | Mamba-2 | hybrid | all differential |", "|---|---|---|---|"]
    return rows + [f"| {texts} | {' | '.join(each)} |" for texts, each in rates.items()]


def shown(line: dict[str, Any]) -> str:
    if "length" in line:
        return f"| {line['shape']} | {line['length']:,} | {1000 * line['seconds a token']:.2f} |"
    cells = [f"{line['shape']} | {line['rows']} | {line['new']}"]
    for name in NAMES:
        cells.append(f"{line[name]['whole']:.1f} | {line[name]['writing']:.1f}" if name in line else " | ")
    return f"| {' | '.join(cells)} | {line['same tokens']:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shapes", nargs="+", default=["mamba-130m", "mamba2-130m"])
    parser.add_argument("--own", nargs="+", help="The package's own types, by their names in `analyze train`.")
    parser.add_argument("--mamba-ssm", action="store_true", help="mamba_ssm's own models and generation as the peer.")
    parser.add_argument("--layers", type=int, help="Number of layers, by default the shape's, 24 of own types.")
    parser.add_argument("--width", type=int, default=768, help="Width of own types.")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--prompt", type=int, default=16, help="Tokens of each prompt.")
    parser.add_argument("--new", nargs="+", type=int, default=[64], help="Tokens written after each prompt.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=int, help="Length up to which one text is written.")
    parser.add_argument("--json", type=Path, help="File to which every measurement is added as a line.")
    parser.add_argument("--draw", type=Path, help="Picture to draw of seconds by length.")
    options = parser.parse_args()
    if options.draw:
        return draw(options.draw)
    torch.set_num_threads(THREADS)
    device = torch.cuda.get_device_name() if options.device == "cuda" else machine()
    whole = ("rows", "new", *(each for name in NAMES for each in (name, "writing alone")), "same tokens")
    head = ("length", "ms a token") if options.lengths else whole
    print(f"{device}, {options.dtype}\n\n| shape | {' | '.join(head)} |\n|{'---|' * (len(head) + 1)}", flush=True)
    for line in (lengths if options.lengths else rates)(options):
        print(shown(line), flush=True)
        if options.json:
            with options.json.open("a") as lines:
                where = {"device": device, "dtype": options.dtype, "transformers version": transformers.__version__}
                lines.write(json.dumps({**line, **where, "layers": options.layers, "width": options.width}) + "\n")


if __name__ == "__main__":
    main()
