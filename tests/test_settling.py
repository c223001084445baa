"""Sets of files that a killed process left at every step of their publication, settled in this process."""

from pathlib import Path

import pytest
from ssmscope.api import writing
from ssmscope.api.writing import check_writable, complete_all_sets, complete_set, locked, publish, read_current
from ssmscope.errors import InputError


def laid(directory: Path, *files: str) -> None:
    """Files at these places whose content is their place."""
    for file in files:
        place = directory / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(file)


def lying(directory: Path) -> dict[str, str]:
    return {file.relative_to(directory).as_posix(): file.read_text() for file in directory.rglob("*") if file.is_file()}


@pytest.mark.parametrize(("before", "after"), [
    (["a.csv", "a.json"], {"a.csv": "a.csv", "a.json": "a.json"}),
    # The new set is not yet valid.
    (["a.csv", ".a.staged/a.csv", ".a.staged/a.json"], {"a.csv": "a.csv"}),
    # Old files were moved away, and the new ones were taken back.
    (["a.csv", ".a.old/a.csv", ".a.old/a.json"], {"a.csv": "a.csv", "a.json": ".a.old/a.json"}),
    ([".a.old/a.json", ".a.old/a.csv", ".a.staged/a.csv"], {"a.json": ".a.old/a.json", "a.csv": ".a.old/a.csv"}),
    # The new set is valid.
    (["a.csv", "a.json", "a.png", ".a.pending/a.csv", ".a.pending/a.json"],
     {"a.csv": ".a.pending/a.csv", "a.json": ".a.pending/a.json", "a.png": "a.png"}),
    (["a.json", ".a.old/a.csv", ".a.pending/a.csv", ".a.pending/a.json"],
     {"a.csv": ".a.pending/a.csv", "a.json": ".a.pending/a.json"}),
    ([".a.pending/a.json", "a.csv", ".a.old/a.csv"], {"a.json": ".a.pending/a.json", "a.csv": "a.csv"}),
    # Other sets stay as they are.
    (
        ["b.csv", ".b.pending/b.csv", ".b.old/b.json", ".b.staged/b.csv", ".a.pending/a.csv"],
        {
            **{name: name for name in ("b.csv", ".b.pending/b.csv", ".b.old/b.json", ".b.staged/b.csv")},
            "a.csv": ".a.pending/a.csv",
        },
    ),
])  # fmt: skip
def test_a_set_is_settled(tmp_path: Path, before: list[str], after: dict[str, str]) -> None:
    laid(tmp_path, *before)
    complete_set(tmp_path, "a")
    assert lying(tmp_path) == after and not list(tmp_path.glob(".a.*"))
    complete_set(tmp_path, "a")
    assert lying(tmp_path) == after


def test_all_sets_of_a_directory_are_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[str] = []
    own = complete_set
    monkeypatch.setattr(writing, "complete_set", lambda directory, name: settled.append(name) or own(directory, name))
    laid(tmp_path, ".b.c.pending/b.c.json", ".a.pending/a.json", "a.json", ".d.staged/d.json", ".e.old/e.json")
    complete_all_sets(tmp_path)
    assert settled == ["a", "b.c"]
    assert lying(tmp_path) == {
        "a.json": ".a.pending/a.json",
        "b.c.json": ".b.c.pending/b.c.json",
        **{name: name for name in (".d.staged/d.json", ".e.old/e.json")},
    }


def test_what_is_read_is_the_newest_set(tmp_path: Path) -> None:
    laid(tmp_path, "a.json", "a.csv", "b.json", ".a.pending/a.json", ".a.old/a.csv", ".b.staged/b.json")
    found = {name: read_current(tmp_path / name).decode() for name in ("a.json", "a.csv", "b.json")}
    assert found == {"a.json": ".a.pending/a.json", "a.csv": "a.csv", "b.json": "b.json"}
    for absent in ("c.json", "none/a.json", "a.csv/b"):
        with pytest.raises(OSError):
            read_current(tmp_path / absent)


def test_a_set_replaces_what_a_killed_process_left(tmp_path: Path) -> None:
    laid(tmp_path, "a.json", "a.png", ".a.pending/a.csv", ".a.old/a.json")
    publish(tmp_path / "new" / "place", "a", {"a.json": b"one"})
    publish(tmp_path, "a", {"a.json": b"two", "a.csv": b"three"})
    assert lying(tmp_path) == {"a.json": "two", "a.csv": "three", "a.png": "a.png", "new/place/a.json": "one"}


def test_a_directory_is_given_back(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path / "own"):
            (lock,) = (tmp_path / "own").iterdir()
            assert lock.name == writing.LOCK and lock.read_text().strip().isdigit()
            with pytest.raises(InputError, match=f"own is in use by process {lock.read_text().strip()}; wait until"):
                with locked(tmp_path / "own"):
                    pass
    assert list((tmp_path / "own").iterdir()) == []
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "new" / "own"):
        raise ZeroDivisionError
    assert not (tmp_path / "new").exists()
    check_writable(tmp_path / "own")
