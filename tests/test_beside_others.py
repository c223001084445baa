"""The guide for people who come from other libraries: its code runs where these are installed, with equal numbers."""

import importlib.util
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "beside-others.md"
BLOCKS = dict(re.findall(r'^```python title="(\w+)"\n(.*?)^```$', PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL))


def test_each_library_has_its_code() -> None:
    assert list(BLOCKS) == ["transformer_lens", "nnsight", "captum", "inseq"]
    for code in BLOCKS.values():
        assert "assert_close" in code
        compile(code, PAGE.name, "exec")


@pytest.mark.parametrize("library", BLOCKS)
def test_the_numbers_agree(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make test-beside-others")
    (tmp_path / "said.py").write_text(BLOCKS[library], encoding="utf-8")  # nnsight reads the source of its blocks
    spec = importlib.util.spec_from_file_location("said", tmp_path / "said.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
