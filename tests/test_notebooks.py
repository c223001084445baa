"""The notebooks run from first to last cell with the installed package alone, and show what their texts describe."""

import ast
import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from warm import TRANSFORMERS, Process, Warm

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat: pip install '.[docs]'")
nbclient = pytest.importorskip("nbclient", reason="notebooks need nbclient: pip install '.[docs]'")
pytest.importorskip("ipykernel", reason="notebooks need ipykernel: pip install '.[docs]'")

from jupyter_client.provisioning import local_provisioner  # noqa: E402

KERNEL = Warm("ipykernel.kernelapp", parent=TRANSFORMERS)
ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}

SHOWN = {
    "look-into-a-model": {
        "heatmap": "SelectionHeatmap",
        "attention": "ImplicitAttention",
        "influence": "Influence",
        "stability": "Stability",
    },
    "are-explanations-faithful": {"explain": "Explanation", "fidelity": "Fidelity", "sanity": "SanityCheck"},
    "robustness-audit": {
        "position": "PositionBias", "insertion": "InsertionSweep", "overflow": "StateOverflow", "words": "WordAttack",
        "prompts": "PromptAttack", "effect": "AttackEffect",
    },
    "where-does-this-fact-come-from": {
        "patch": "Patching", "heads": "Patching", "knockout": "Knockout", "hybrid": "Knockout",
    },
    "circuits": {"exact": "Circuit", "ablated": "Ablation", "trained": "Circuit"},
    "while-it-writes": {"written": "Writing"},
    "a-published-model": {"fence": "SelectionHeatmap", "cut": "Knockout"},
    "is-it-the-same-model": {"wrong": "Parity"},
    "differential-and-plain": {"snr": "NeedleSNR", "retrieval": "Retrieval", "loss": "TokenLoss"},
}  # fmt: skip
"""The cells that end in a result, and its class."""

MAX_BYTES = 1_500_000
"""Largest size of all notebooks together."""


def test_these_are_the_notebooks() -> None:
    assert set(NOTEBOOKS) == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_each_code_cell_has_the_outputs_that_it_shows(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    names = [cell.id for cell in notebook.cells]
    assert all(re.fullmatch(r"[a-z][a-z-]*", each) for each in names) and len(set(names)) == len(names)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    for cell in code:
        last = ast.parse(cell.source).body[-1]
        ends = isinstance(last, ast.Expr) and not ast.unparse(last).startswith("print(")
        assert (shown(cell) is not None) == ends and bool(printed(cell)) == ("print(" in cell.source), cell.id
        assert {each.output_type for each in cell.outputs} <= {"execute_result", "stream"} and not cell.metadata
    for cell in code:
        if kind := SHOWN[name].get(cell.id):
            assert shown(cell)["text/plain"].startswith(f"<{kind}") and "image/png" in shown(cell)


def test_outputs_are_small_and_of_no_machine() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS.values()) < MAX_BYTES
    private = re.compile(
        r"(?<![\w./])/(?:home|tmp|usr|var|opt|Users|mnt)/|[A-Z]:\\\\|0x[0-9a-f]{6}|site-packages|\d ms\b"
    )
    for path in NOTEBOOKS.values():
        assert not private.findall(re.sub(r'"image/png": ".*"', "", path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize("name", SHOWN)
def test_links_lead_somewhere(name: str) -> None:
    texts = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#]+)", texts)
    assert links and not [link for link in links if not (NOTEBOOKS[name].parent / link).is_file()]


@pytest.mark.parametrize("name", SHOWN)
def test_runs_and_shows_its_results(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSMSCOPE_DATA", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(local_provisioner, "launch_kernel", launched)
    notebook = read(name)
    if (needs := notebook.metadata.get("needs")) is not None:
        pytest.importorskip(needs, reason=f"{name} needs {needs}: see make test-foreign")
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = {cell.id: cell for cell in notebook.cells}
    ends = {each: result for each, cell in cells.items() if (result := shown(cell)) is not None}
    for cell, kind in SHOWN[name].items():
        assert ends[cell]["text/plain"].startswith(f"<{kind}"), ends[cell]["text/plain"]
        assert '<div class="ssmscope' in ends[cell]["text/html"]
    CHECKS[name](cells)
    assert worded(notebook) == worded(read(name)), "the notebook shows other outputs than it gives: make notebooks"
    assert not list(tmp_path.iterdir())
    if (site := hook()) is not None:
        site.keep(NOTEBOOKS[name], notebook)
        assert [cell.get("outputs") for cell in site.executed(NOTEBOOKS[name]).cells] == [
            cell.get("outputs") for cell in notebook.cells
        ]


def launched(command: list[str], *, env: dict[str, str], cwd: str, **_: Any) -> Process:
    """A kernel as `python -m ipykernel_launcher ARGUMENTS` is one, in a process that need not import torch itself."""
    assert command[1:3] == ["-m", "ipykernel_launcher"]
    code = "import runpy; runpy.run_module('ipykernel_launcher', run_name='__main__', alter_sys=True)"
    return KERNEL.start(code, *command[3:], env=env, cwd=cwd)


def shows_a_rationale_and_a_verdict(cells: Any) -> None:
    assert "'positive'" in shown(cells["trace"])["text/plain"] and "'negative'" in shown(cells["trace"])["text/plain"]
    assert re.search(r"\b(stable|marginal|unstable)\b", printed(cells["stability"]))
    assert "film.json" in shown(cells["keep"])["text/plain"]


def tells_methods_apart_from_random(cells: Any) -> None:
    lines = printed(cells["differences"]).splitlines()
    assert [line.split()[0] for line in lines] == ["ig", "lrp", "gradxinput", "self-retention", "self-write"]
    for line in lines:
        low, high = map(float, re.search(r"\[(\S+), (\S+)\]", line).groups())  # type: ignore[union-attr]
        word = "better" if low > 0 else "worse" if high < 0 else "not told apart"
        assert f": {word}" in line
    assert "better" in lines[0] and "better" in lines[1]
    assert re.search(r"\| random \|.*\[", printed(cells["table"]))
    assert re.fullmatch(r"\S+ \[\S+, \S+\]\n", printed(cells["own"]))


def measures_the_twelve_reviews(cells: Any) -> None:
    assert shown(cells["data"])["text/plain"] == "'12 texts of twelve reviews'"
    assert "accuracy 1.000" in shown(cells["overflow"])["text/plain"]


def compares_three_models(cells: Any) -> None:
    assert re.findall(r"^babi-\S+", printed(cells["models"]), flags=re.M) == [
        "babi-mamba2",
        "babi-diff-mamba",
        "babi-hybrid",
    ]
    assert len(re.findall(r" − .*\[\S+, \S+\]", printed(cells["snr-reading"]))) == 3
    assert "→" in printed(cells["filler"])


def finds_the_layer_that_holds_the_answer(cells: Any) -> None:
    assert "('attic', 0.99" in shown(cells["model"])["text/plain"]
    assert "most in layer 3, " in printed(cells["where"]) and "layer 3, head 0" in printed(cells["address"])
    assert re.search(r"“attic” −(99|100)\.\d % in all layers, most in layer 3", printed(cells["road"]))
    gone, halved, after = printed(cells["own"]).splitlines()
    assert "attic" not in gone and "attic" in halved and after.startswith("nothing is left behind: attic")
    assert "most in layer 5 (attention) (−9" in printed(cells["which-road"])


def finds_the_edges_that_were_written(cells: Any) -> None:
    assert printed(cells["true"]) == "the edges that were written: True\n"
    assert printed(cells["taps"]).splitlines() == [
        "mixer 1 → logits",
        "embedding → mixer 1 (tap 0)",
        "embedding → mixer 1 (tap 1)",
    ]
    assert printed(cells["attended"]).count("1.00 of the last token's attention") == 2
    assert "1 of 2 layers can go alone" in shown(cells["ablated"])["text/plain"]
    assert "most harm: layer 1, share worse by 1.000" in shown(cells["ablated"])["text/plain"]
    assert "mixer 3 → logits" in printed(cells["stories"]).splitlines()
    edges, every, share = re.match(r"(\d+) of (\d+) edges, .* carry (\S+)", printed(cells["greedy"])).groups()  # type: ignore[union-attr]
    assert int(edges) < int(every) and float(share) >= 0.9


def writes_what_the_edits_make_of_it(cells: Any) -> None:
    assert "of the states at the end is of the prompt" in printed(cells["kept"])
    assert len(printed(cells["stream"]).splitlines()) == 8
    plain, *edited = (re.search(r"(-\S+)  (.*)", line).groups() for line in printed(cells["edits"]).splitlines())  # type: ignore[union-attr]
    assert len(edited) == 4 and all(float(said) < float(plain[0]) and text != plain[1] for said, text in edited)
    places = re.findall(r"layer (\d): Clara is in the (\w+), Bob in the (\w+)", printed(cells["fact"]))
    assert places == [(str(layer), "attic" if layer == 3 else "library", "cellar") for layer in range(6)]
    lowest, _, _, whales, _ = printed(cells["steered"]).splitlines()
    assert "open open open open" in lowest and "whale" in whales


def finds_what_is_kept(cells: Any) -> None:
    assert printed(cells["own"]).endswith("True\n") and printed(cells["fence"]) == "python\n"
    assert re.search(
        r"“96” \(token 26\) has 4\d\d × its neighbours' share in layer 2", shown(cells["fence"])["text/plain"]
    )
    cut = dict(re.findall(r"cut in (.*): (\S+)", printed(cells["cut"])))
    assert -2.2 < float(cut["layer 2"]) < -2 and all(abs(float(cut[f"layer {at}"])) < 0.1 for at in (0, 1, 3, 5))
    assert "changes by -5.5" in printed(cells["replace"])
    found = re.findall(
        r"in, css: lift at most (\S+), a cut changes the logit by at most (\S+)", printed(cells["style"])
    )
    assert len(found) == 3 and all(float(lift) < 6 and float(most) <= 0.1 for lift, most in found)


def names_the_fault_of_a_runtime(cells: Any) -> None:
    assert "is of the same model: 29 tensors agree" in printed(cells["right"])
    assert "differs in the output of layer 2, after token 0" in shown(cells["wrong"])["text/plain"]
    assert printed(cells["library"]).count(" agrees\n") == 3


CHECKS = {
    "a-published-model": finds_what_is_kept, "is-it-the-same-model": names_the_fault_of_a_runtime,
    "while-it-writes": writes_what_the_edits_make_of_it, "circuits": finds_the_edges_that_were_written,
    "where-does-this-fact-come-from": finds_the_layer_that_holds_the_answer,
    "look-into-a-model": shows_a_rationale_and_a_verdict, "are-explanations-faithful": tells_methods_apart_from_random,
    "robustness-audit": measures_the_twelve_reviews, "differential-and-plain": compares_three_models,
}  # fmt: skip


def hook() -> ModuleType | None:
    """Return the hook that makes pages of the notebooks, which need not be run again for it."""
    if importlib.util.find_spec("mkdocs") is None:
        return None
    spec = importlib.util.spec_from_file_location("docs_notebooks", ROOT / "docs" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name: str) -> Any:
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def shown(cell: Any) -> Any:
    """Return the output of the cell's last line."""
    results = [each for each in cell.get("outputs", []) if each.output_type == "execute_result"]
    return results[-1].data if results else None


def worded(notebook: Any) -> list[str]:
    """What cells print and their last lines say, without numbers, whose last digits differ between machines, nor
    the text of data frames, which depends on the terminal."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    ends = [shown(cell) or {} for cell in code]
    said = ["" if "dataframe" in end.get("text/html", "") else end.get("text/plain", "") for end in ends]
    texts = [f"{printed(cell)} {line}" for cell, line in zip(code, said)]
    return [" ".join(re.sub(r"[-−+]?\d[\d.,]*(e[-+]\d+)?", "#", text).split()) for text in texts]


def printed(cell: Any) -> str:
    return "".join(each.text for each in cell.outputs if each.output_type == "stream" and each.name == "stdout")
