"""Every option of every verb that takes a file is handed files that are damaged, no files, or of another kind: the
answer is an answer, or one line, exit code 2 and nothing written. `SSMSCOPE_HOSTILE_PART=1` hands every file to every
verb."""

import os
from collections.abc import Iterator
from pathlib import Path

import hostile
import pytest
import typer
from ssmscope import cli
from ssmscope.loading.load import ModelCache, cache_models

CLASSIFIER, PROMPTED, ASKED, PIXELS = (
    f"demo/{name}" for name in ("sst2-mamba", "instruct-mamba2", "babi-mamba2", "cifar10-mamba")
)
TEXT = ("--text", "a good film")
LABELLED = ("--limit", "2")
TOWARD = ("--toward", "a good film", "--away", "a bad film")
POISON = (
    "--data", "fine", "--length", "1", "--set", "sweeps=1", "--set", "candidates=1", "--set", "draws=1",
    "--no-progress",
)  # fmt: skip
VERB_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "heatmap": (CLASSIFIER, *TEXT),
    "attention": (CLASSIFIER, *TEXT),
    "explain": (CLASSIFIER, *TEXT, "--methods", "self-retention"),
    "fidelity": (CLASSIFIER, *LABELLED, "--methods", "self-retention", "--steps", "2"),
    "position": (CLASSIFIER, *LABELLED),
    "insertion": (CLASSIFIER, *LABELLED, "--places", "2"),
    "noise": (CLASSIFIER, *LABELLED, "--rates", "0.1"),
    "overflow": (CLASSIFIER, "--data", "fine", *LABELLED, "--lengths", "2"),
    "poison": (CLASSIFIER, *POISON),
    "prompts": (PROMPTED, "--data", "fine", *LABELLED, "--words", "bad,good", "--template", "{content} is"),
    "words": (CLASSIFIER, "--data", "fine", *LABELLED),
    "snr": (ASKED, "--tasks", "qa1", "--lengths", "0", "--examples", "1"),
    "retrieval": (ASKED, "--tasks", "qa1", "--lengths", "0", "--examples", "1", "--no-progress"),
    "loss": (PROMPTED, "--length", "4", "--limit", "1", "--smooth", "1", "--no-progress"),
    "stability": (CLASSIFIER,),
    "influence": (CLASSIFIER, "--no-exact"),
    "train": ("mamba2", "--epochs", "1", "--set", "width=8", "--set", "layers=1", "--set", "state=4", "--no-progress"),
    "steer": (CLASSIFIER, *TEXT, "--limit", "2", "--random", "1", "--strengths", "1"),
    "lens fit": (PROMPTED, "--steps", "1", "--length", "4", "--set", "batch_tokens=8"),
    "lens show": (PROMPTED, *TEXT),
    "parity": (PROMPTED,),
    "precision": (PROMPTED, "--length", "4", "--limit", "1", "--state", "int8"),
}
"""What each verb is given beside its file: a model, and what makes it quick."""

LABELS = ("--data", "--validation", "--test")
PART = int(os.environ.get("SSMSCOPE_HOSTILE_PART", "18"))
"""Of how many hostile files of a kind each verb meets one; 1: it meets all of them."""
READERS: dict[str, tuple[tuple[str, str], ...]] = {
    "--file": ((".txt", "lines"), (".csv", "csv"), ("", "lines")), "--image": ((".png", "image"),),
    "--data": ((".jsonl", "jsonl"), (".csv", "csv"), (".tsv", "tsv"), (".parquet", "parquet"), (".txt", "lines")),
    "--validation": ((".jsonl", "jsonl"), (".csv", "csv")), "--test": ((".csv", "csv"),),
    "--filler": ((".txt", "lines"), (".jsonl", "jsonl")), "--questions": ((".jsonl", "questions"), (".csv", "csv")),
    "--semantic": ((".txt", "lines"),), "--embeddings": ((".npz", "npz"), (".txt", "vectors")),
    "--synonyms": ((".json", "synonyms"), (".csv", "csv")), "--vocabulary": ((".txt", "lines"),),
    "--cache": ((".sqlite", "database"),), "--lens": (("", "lens"),), "--vector": (("", "direction"),),
    **dict.fromkeys(("--states", "--logits", "--layers"), ((".safetensors", "direction"),)),
}  # fmt: skip
"""The options that take a file, and what kinds of hostile files each gets, by how their names end."""
MODELS = {"--masked-lm", "--encoder", "--tokenizer", "--init-from"}
"""Options that name models."""
WRITTEN = {"--save", "--export"}
"""Options that name a file or a directory to write."""
REPORTS = {"--baseline"}
"""Options that name a report; tests/reports/test_scores.py gives damaged ones."""
OTHER_FILES = {
    "--out", "--device", "--split", "--text", "--ids", "--clean", "--corrupted", "--json", "--progress", "--template",
    "--insert", "--words", "--series", "--chat", "--option", "--methods", "--contrast", "--layers", "directory",
}  # fmt: skip
"""Options of other verbs' common kinds, which hold no name of a file, the directory of `push`, and files of series and
chats, whose own tests give damaged ones."""
NEEDS = {
    "--semantic": ("--attacks", "semantic"),
    "--embeddings": ("--recipe", "textfooler"),
    "--synonyms": ("--recipe", "pwws"),
}


def verbs() -> Iterator[tuple[str, list]]:
    def walk(command, name: str) -> Iterator[tuple[str, list]]:
        if hasattr(command, "commands"):
            for part, below in command.commands.items():
                yield from walk(below, f"{name} {part}".strip())
        else:
            yield name, command.params

    yield from walk(typer.main.get_command(cli.app), "")


VERBS = dict(verbs())
TAKEN = [
    (verb, option.opts[0])
    for verb, parameters in VERBS.items()
    if verb in VERB_ARGUMENTS
    for option in parameters
    if option.opts[0] in READERS and not (verb == "prompts" and option.opts[0] == "--embeddings")
    if option.opts[0] != "--layers" or verb == "parity"
]


def test_no_option_that_takes_a_file_is_forgotten() -> None:
    named = {"FILE", "DATA", "LENS", "DIR", "LENS…", "promptbench|FILE"}
    forgotten = {
        (verb, option.opts[0])
        for verb, parameters in VERBS.items()
        for option in parameters
        if option.metavar in named and option.opts[0] not in {*READERS, *MODELS, *OTHER_FILES, *WRITTEN, *REPORTS}
    }
    assert not forgotten and set(VERB_ARGUMENTS) <= set(VERBS)
    assert {verb for verb, _ in TAKEN} == set(VERB_ARGUMENTS)


def kinds(option: str, kind: str, folder: Path) -> dict[str, bytes]:
    """Hostile content of one kind by its name."""
    text = hostile.NOT_TEXT
    if kind in ("jsonl", "questions"):
        base, fields = (
            (hostile.LABELLED, ("text", "label")) if kind == "jsonl" else (hostile.ASKED, ("context", "answer"))
        )
        rows = {f"{at}-{name}": each for at in fields for name, each in hostile.jsonl(base, at).items()}
        return {**rows, **text}
    return {
        "csv": lambda: {**hostile.csv(","), **hostile.CSV_ONLY, **text}, "tsv": lambda: {**hostile.csv("\t"), **text},
        "parquet": lambda: {name: each for name, each in hostile.parquet() if name != "many-rows"} | text,
        "lines": lambda: text, "image": lambda: {**hostile.images(), **text},
        "npz": lambda: {**dict(hostile.archives()), **text}, "vectors": lambda: {**hostile.VECTORS, **text},
        "synonyms": lambda: {**hostile.SYNONYMS, **text}, "database": lambda: dict(hostile.databases(folder)),
        "lens": lambda: {}, "direction": lambda: {**dict(hostile.directions()), **text},
    }[kind]()  # fmt: skip


def lenses(root: Path) -> dict[str, Path]:
    """Directories without a lens, or with a damaged one."""
    found = {}
    files: dict[str, dict[str, bytes]] = {
        "nothing": {},
        "deep": {"config.json": b"[" * hostile.DEEP, "params.pt": b""},
        "null": {"config.json": b"null", "params.pt": b""},
        "odd": {"config.json": b'{"d_model": [], "num_hidden_layers": {}}', "params.pt": b""},
        "binary": {"config.json": b"\xff\xfe", "params.pt": b"\x80"},
        "record": {"config.json": b"{}", "params.pt": b"", "lens.json": b"[" * hostile.DEEP},
    }
    for name, content in files.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for file, each in content.items():
            (root / name / file).write_bytes(each)
        found[name] = root / name
    return found


@pytest.fixture(scope="module")
def kept() -> Iterator[None]:
    with cache_models(ModelCache(8)):
        yield


@pytest.fixture(scope="module")
def fine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fine") / "fine.csv"
    path.write_text("text,label\na good film,1\na bad film,0\n")
    return path


@pytest.mark.parametrize(("verb", "option"), TAKEN, ids=lambda value: value.replace(" ", "-"))
def test_a_hostile_file_is_refused_in_one_line_or_read(verb, option, tmp_path, fine, kept, analyze) -> None:
    base = [str(fine) if each == "fine" else each for each in VERB_ARGUMENTS[verb]]
    if verb in ("train", "lens fit") and option != "--data":
        base += ["--data", str(fine)]
    if verb == "steer" and option != "--vector":
        base += TOWARD
    for name in ("--text", "--template") if option in ("--file", "--image", "--semantic") else ():
        if name in base:
            del base[base.index(name) : base.index(name) + 2]
    if option == "--data" and "--data" in base:
        del base[base.index("--data") : base.index("--data") + 2]
    if option == "--image":
        base[0] = PIXELS
    if option == "--questions":
        for name in ("--tasks", "--lengths"):
            del base[base.index(name) : base.index(name) + 2]
    part = sorted(VERB_ARGUMENTS).index(verb)  # the readers are shared: each verb meets its part of the files
    others = list(hostile.folders(tmp_path / "paths").values())
    paths = [("", True, path) for path in others[part % min(PART, 2) :: min(PART, 2)]]
    if option == "--cache":
        paths = [("", True, path) for path in others if path.name in ("directory", "file")]
    if option == "--lens":
        paths += [("lens", True, path) for path in lenses(tmp_path / "lenses").values()]
    for suffix, kind in READERS[option]:
        content = list(kinds(option, kind, tmp_path).items())
        content = content[part % PART :: PART]
        for name, each in content:
            path = tmp_path / f"{kind}-{name}{suffix}"
            path.write_bytes(each)
            paths.append((name, name in hostile.NOT_TEXT and kind != "database", path))
    refused = 0
    for name, certainly, path in paths:
        before = set(tmp_path.rglob("*"))
        answer = analyze(*verb.split(), *base, *NEEDS.get(option, ()), option, path, "--out", tmp_path / "new" / "out")
        assert answer.code == 2 or (answer.code == 0 and not certainly), (name, path, answer)
        if answer.code == 2:
            refused += 1
            assert answer.err.startswith("analyze: ") and answer.err.count("\n") == 1 and not answer.out
            assert set(tmp_path.rglob("*")) == before, (name, path)
    assert refused > len(paths) / 2


@pytest.mark.parametrize("option", sorted(WRITTEN))
def test_where_nothing_can_be_written_is_refused_in_one_line(option, tmp_path, kept, analyze) -> None:
    base = ["steer", PROMPTED, *VERB_ARGUMENTS["steer"][1:], *TOWARD, "--layer", "1"]
    places = hostile.folders(tmp_path / "paths")
    before = set(tmp_path.rglob("*"))
    for name in ("directory", "long", "below-a-file", *(["dangling", "loop"] if option == "--export" else [])):
        answer = analyze(*base, option, places[name], "--out", tmp_path / "new" / "out")
        assert answer.code == 2 and answer.err.startswith("analyze: ") and answer.err.count("\n") == 1, (name, answer)
        assert set(tmp_path.rglob("*")) == before, name
    answer = analyze(*base, option, places["absent"], "--answer", "nothing like it", "--out", tmp_path / "new" / "out")
    assert answer.code == 2 and set(tmp_path.rglob("*")) == before, answer
    assert analyze(*base, option, places["absent"], "--out", tmp_path / "out").code == 0 and places["absent"].exists()
