"""The verbs print and write what is recorded in tests/recorded. Every other test asserts what is right; this one
notices what changes. Where a change is meant, `python tools/record_outputs.py record tests/recorded --small` records
anew what the difference then shows."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORDED = Path(__file__).with_name("recorded")
sys.path.insert(0, str(ROOT / "tools"))

from compare_outputs import compare  # noqa: E402
from record_outputs import read_cases, read_tolerances, run, write_inputs, write_words  # noqa: E402

CASES = {name: line for name, line in read_cases(pages=True).items() if Path(RECORDED, name).is_dir()}
TOLERANCES = read_tolerances()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("recorded")
    write_inputs(found / "inputs")
    return found


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_as_recorded(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if {"--data", "--limit", "snr", "sst2"} & set(CASES[case]) and "SSMSCOPE_DATA" not in os.environ:
        pytest.skip("reads a data set; set SSMSCOPE_DATA to try it")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    # Figures of every recorded kind are laid out in tests/render and tests/views.
    monkeypatch.setattr("ssmscope.render.pictures.encode_figure", lambda figure, suffix: b"")
    run(case, CASES[case])
    write_words(Path(case))
    found = compare(RECORDED / case, Path(case), tolerance=TOLERANCES[case])
    assert [line for line in found if not line.endswith(f"only in {case}")] == []  # large files are not recorded
