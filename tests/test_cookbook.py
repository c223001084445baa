"""The recipes of the cookbook do what they say."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cookbook.md"
NUMBER = re.compile(r"−?\d+(?:\.\d+)?")
WORDS = {"gripping": "positive", "dull": "negative", "warm": "positive", "tedious": "negative"}


def recipes() -> Iterator[SimpleNamespace]:
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        blocks = re.findall(r'```(\w+)(?: title="([^"]*)")?\n(.*?)```', section, flags=re.DOTALL)
        yield SimpleNamespace(
            name=section.partition("\n")[0], blocks=blocks, after=section.rpartition("```")[2].strip()
        )


RECIPES = list(recipes())


def test_there_are_fifteen_with_a_gotcha() -> None:
    assert len(RECIPES) == 15 and all(each.after for each in RECIPES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_prints_what_it_says(recipe, tmp_path, monkeypatch, analyze, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"A {word} film.,{label}\n" for word, label in WORDS.items())
    Path("reviews.csv").write_text(f"text,label\n{rows * 5}")
    printed = ""
    for kind, file, code in recipe.blocks:
        if kind == "yaml":
            Path(file).write_text(code)
        elif kind == "sh":
            answer = analyze(*shlex.split(code.replace("\\\n", ""))[1:])
            printed = answer.out
            assert answer.code == 0, answer.err
        elif kind == "python":
            exec(compile(code, recipe.name, "exec"), {"__name__": "recipe"})
            printed = capsys.readouterr().out
        else:
            printed, said = (" ".join(text.split()) for text in (printed, code))
            assert NUMBER.sub("#", printed).startswith(NUMBER.sub("#", said))
            ours, theirs = (list(map(float, NUMBER.findall(text.replace("−", "-")))) for text in (printed, said))
            assert ours[: len(theirs)] == pytest.approx(theirs, rel=0.1)
