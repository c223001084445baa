"""Run the notebooks and keep their outputs in them, small and without what changes from run to run.

    python tools/run_notebooks.py [NAME ...]

A result is kept as its one line and its picture in 64 colours, which every viewer shows; who runs the notebook sees
coloured tokens, interactive maps and tables. Progress, times and versions are left out, and cells are counted from 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
PICTURES = """
import io
from PIL import Image
from ssmscope import Result

def draw(result):
    drawn, small = io.BytesIO(), io.BytesIO()
    result.figure().savefig(drawn, format="png", dpi=100)
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()

formatters = get_ipython().display_formatter.formatters
formatters["image/png"].for_type(Result, draw)
formatters["text/html"].for_type(Result, lambda result: None)
"""
"""Run before the first cell: results show their pictures in place of their pages."""


def run(path: Path) -> Any:
    """Return the notebook with the outputs that are kept, run without data, in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(PICTURES))
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"record_timing": False, "coalesce_streams": True, "timeout": 300}
        NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}}, **options).execute()
    del notebook.cells[0]
    notebook.metadata = metadata
    return kept(notebook)


def kept(notebook: Any) -> Any:
    """Leave out progress and number the code cells and their outputs from 1."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(code, 1):
        cell.execution_count, cell.metadata = count, {}
        cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count, output.metadata = count, {}
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ.pop("SSMSCOPE_DATA", None)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        needs = nbformat.read(path, as_version=4).metadata.get("needs")
        if needs is not None and importlib.util.find_spec(needs) is None:
            print(f"{path.name} is left as it is: it needs {needs}")
        elif not names or path.stem in names:
            nbformat.write(run(path), path)
            print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
