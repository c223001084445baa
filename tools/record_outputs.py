"""Record the output of every verb and of every small model, and compare two recordings.

    python tools/record_outputs.py record DIR [--only VERB ...] [--small]
    python tools/record_outputs.py compare OLD NEW [--tolerance 1e-4]

A safety net for refactorings: record before and after, then compare. `record` runs each line of `record_cases.txt`
through the command's entry point, in this process and on one thread, and writes DIR/CASE/ with the verb's JSON and CSV,
`stdout.txt` and `exit` (and `stderr.txt` where the exit code is not 0). The case `architectures` holds what no verb
prints: for each model of the tests' `small_models` its logits, states, maps, survival and gradients, one JSON
per model. Data sets are read from the folder that SSMSCOPE_DATA names. The package is the one that Python imports:
PYTHONPATH chooses it. With `--small`, what tests/test_recorded.py compares with is made anew: the cases that DIR has,
each with the words of its pages and without files of more than 20 kB.

`compare` prints what differs and exits with 1 if anything does, see `compare_outputs.py`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import itertools
import json
import os
import random
import re
import shlex
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
os.environ |= {"HF_DATASETS_OFFLINE": "1", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"}

import numpy as np  # after the number of threads is set
from compare_outputs import compare

CASES = Path(__file__).resolve().with_name("record_cases.txt")
TESTS = Path(__file__).resolve().parents[1] / "tests"
ARCHITECTURES = "architectures"
WITHOUT_OUT = ("models", "serve")
WITHOUT_FORMATS = (*WITHOUT_OUT, "train", "report", "lens")
MAX_BYTES = 20_000
SHORT_IDS = [[5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5], [7, 8, 9], [90, 1, 2, 3, 4, 5]]
LONG_IDS = [[(7 * i * i + 3 * i) % 97 for i in range(length)] for length in (300, 170)]
"""Token ids for the small models: a padded batch, and texts longer than the pieces in which scans and sums run."""


def read_cases(pages: bool = False) -> dict[str, list[str]]:
    """Return the command line of every case, with pages of its results or without.

    Without figures, which take most of the time.
    """
    definitions: dict[str, str] = {}
    cases: dict[str, list[str]] = {}
    for line in CASES.read_text().splitlines():
        if match := re.match(r"([A-Z]+) = (.*)", line):
            definitions[match[1]] = match[2]
        elif match := re.match(r"([a-z0-9-]+)(?: ±\S+)?: (.*)", line):
            verb, *more = shlex.split(match[2].format(**definitions))
            out = [] if verb in WITHOUT_OUT else ["--out", match[1]]
            formats = (
                [] if verb in WITHOUT_FORMATS else ["--formats", "csv,html" if pages else "csv"]
            )  # pictures take most of the time
            cases[match[1]] = [verb, *more, *out, *formats]
    return {**cases, ARCHITECTURES: [ARCHITECTURES]}


def read_tolerances() -> dict[str, float]:
    """Return the tolerance that each case of tests/recorded states."""
    return {name: float(size) for name, size in re.findall(r"^([a-z0-9-]+) ±(\S+):", CASES.read_text(), re.M)}


def record(folder: Path, only: list[str], small: bool) -> None:
    """Run the cases of these verbs, by default all, and write their output to `folder`."""
    if not os.environ.get("SSMSCOPE_DATA"):
        sys.exit("set SSMSCOPE_DATA to the folder that holds the data sets (sst2, books, wikitext2, cifar10, …)")
    import ssmscope

    print(f"recording {ssmscope.__file__}", file=sys.stderr)
    os.environ["SSMSCOPE_DATA"] = os.path.abspath(os.environ["SSMSCOPE_DATA"])
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # so that no output names the folder
    present = {place.name for place in Path().iterdir()}
    write_inputs(Path("inputs"))
    cases = {name: line for name, line in read_cases(small).items() if not small or not present or name in present}
    if unknown := set(only) - {line[0] for line in cases.values()}:
        sys.exit(f"no case is of {', '.join(sorted(unknown))}")
    chosen = {name for name, line in cases.items() if not only or line[0] in only}
    chosen |= {word for name in chosen for word in cases[name] if word in cases}  # the models that they read
    for name in (name for name in cases if name in chosen):
        start = time.perf_counter()
        code = run(name, cases[name])
        if small:
            write_words(Path(name))
            drop_large(Path(name))
        print(f"{time.perf_counter() - start:6.1f} s  {name}  exit {code}", file=sys.stderr)
    if small:
        shutil.rmtree("inputs")


def run(name: str, line: list[str]) -> int | str:
    """Run a case in the current folder, write what it gives to the folder NAME, and return its exit code."""
    import torch
    from ssmscope.cli import main

    shutil.rmtree(name, ignore_errors=True)
    code, stdout, stderr = 0, io.StringIO(), io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            if name == ARCHITECTURES:
                record_architectures(Path(name))
            else:
                sys.argv = ["analyze", *line]
                main()
        except SystemExit as end:
            code = end.code
        except Exception as error:  # a fault of the package is an output too
            code = f"{type(error).__name__}: {error}"
    Path(name).mkdir(exist_ok=True)
    Path(name, "exit").write_text(f"{code}\n")
    Path(name, "stdout.txt").write_text(stdout.getvalue())
    if code:
        Path(name, "stderr.txt").write_text(stderr.getvalue())
    return code


def write_words(folder: Path) -> None:
    """Write the words of each page in a case's folder next to it, as far as its provenance."""
    for page in folder.rglob("*.html"):
        words = Words()
        words.feed(page.read_text())
        lines = itertools.takewhile(lambda line: line != "Provenance", words.lines)
        page.with_suffix(".page.txt").write_text("".join(f"{line}\n" for line in lines))


def drop_large(folder: Path) -> None:
    """Remove large files from a case's folder, and those that are not compared."""
    for file in folder.rglob("*"):
        if file.is_file() and (file.stat().st_size > MAX_BYTES or file.suffix not in (".json", ".csv", ".txt", "")):
            file.unlink()


class Words(HTMLParser):
    """Parser that collects the words of a page in `lines`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.hidden = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = False

    def handle_data(self, data: str) -> None:
        if data.strip() and not self.hidden:
            self.lines.append(" ".join(data.split()))


def write_inputs(folder: Path) -> None:
    """Write a text of some 500 words, an image, and texts with rationales."""
    from PIL import Image

    folder.mkdir(exist_ok=True)
    names, places, draw = "Clara Peter Mary Daniel".split(), "attic garden kitchen office".split(), random.Random(0)
    said = [f"{draw.choice(names)} went to the {draw.choice(places)} and said nothing." for _ in range(50)]
    Path(folder, "long.txt").write_text(" ".join(said) + "\n")
    pixels = np.add.outer(np.arange(32) * 5, np.arange(32) * 3)[..., None] % np.array([256, 200, 150])
    Image.fromarray(pixels.astype(np.uint8)).save(folder / "image.png")
    rows = ["A gripping film.,1,gripping", "The plot is thin and dull.,0,thin and dull", "Great fun.,1,Great"]
    Path(folder, "rationales.csv").write_text("\n".join(["text,label,rationale", *rows]) + "\n")


def record_architectures(folder: Path) -> None:
    """Write the computations of every small model, made loud: as initialised, a scan hardly changes the output."""
    sys.path.insert(0, str(TESTS))
    import torch
    from loud import loud
    from small_models import SMALL_MODELS
    import ssmscope

    folder.mkdir()
    for make in SMALL_MODELS.values():
        torch.manual_seed(0)
        for name, module in make().items():
            model, found = ssmscope.Model(loud(module), name=name), {}
            for size, ids in (("short", SHORT_IDS), ("long", LONG_IDS)):
                for quantity, compute in compute_terms(model, model.encode(ids=ids), size == "long"):
                    try:
                        found[f"{size} {quantity}"] = as_json(compute())
                    except Exception as error:
                        found[f"{size} {quantity}"] = f"{type(error).__name__}: {error}"
            Path(folder, f"{name}.json").write_text(json.dumps(found))


def compute_terms(model: Any, batch: Any, long: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what is computed of a small model on a batch; of long texts only what stays small."""
    import torch
    import ssmscope

    trace = cache(partial(model.trace, batch))
    shown = slice(-3 if long else 0, None)
    maps = partial(ssmscope.attention, model, batch)

    def continued() -> Any:
        first, second = (model.encode(ids=part.tolist()) for part in batch.input_ids[:1].tensor_split(2, dim=1))
        return model.run(second, model.run(first).states).logits[:, -1:]

    def gradients() -> Any:
        embeddings = model.embed(batch).detach().requires_grad_()
        weights = {name: weight for name, weight in model.module.named_parameters() if weight.requires_grad}
        with model.running(mask=batch.mask), torch.enable_grad():
            total = model.forward_embeddings(embeddings, batch.mask).log_softmax(-1)[:, :5].sum()
        found = torch.autograd.grad(total, [embeddings, *weights.values()], allow_unused=True)
        norms = {name: g.norm() for name, g in zip(weights, found[1:]) if g is not None}
        return {"embeddings": found[0], "norms of weights": norms}

    yield "logits", lambda: model.logits(batch)[:, shown] if not model.is_classifier else model.logits(batch)
    yield "continued", continued
    yield "gradients", gradients
    yield "retention", lambda: trace().retention
    yield "survival", lambda: trace().survival()
    yield "survival at 2", lambda: trace().survival(2)
    yield "signed survival", lambda: trace().survival(signed=True)
    yield "half-lives", lambda: [layer.half_lives(per_head=True) for layer in trace().layers]
    yield "states", lambda: [scan.state for layer in trace().layers for scan in layer.scan()]
    yield "gradient attention", partial(maps, gradient=True, rows=[-1])
    for level in ("ssm", "block"):
        yield f"{level} rows", partial(maps, level=level, heads="all", rows=[2, -1], parts=not long)
        yield f"{level} pooled", partial(maps, level=level, pool=5, skip=False)
    if not long:
        yield "maps", maps
        yield "absolute maps", partial(maps, heads="abs")
        yield "rollout", partial(maps, rollout=True)
        yield "explanations", lambda: ssmscope.explain(model, batch, methods=["lrp", "gradxinput"])


def as_json(value: Any) -> Any:
    """Return tensors, results and lists of these as JSON has them."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    packed = base64.b64encode(zlib.compress(value.detach().float().numpy().tobytes())).decode()
    return {"dtype": "float32", "shape": list(value.shape), "zlib": packed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--only", nargs="+", metavar="VERB", default=[])
    recording.add_argument("--small", action="store_true", help="make tests/recorded anew")
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--tolerance", type=float, default=1e-4)
    given = parser.parse_args()
    if given.command == "record":
        record(given.folder, given.only, given.small)
    else:
        lines = list(compare(given.old, given.new, given.tolerance))
        print(*(lines or ["no differences"]), sep="\n")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
