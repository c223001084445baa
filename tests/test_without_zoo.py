"""The package with `zoo/` deleted: everything else imports and answers, and nothing of the zoo is named."""

import json
import shutil
from pathlib import Path

import pytest
from warm import TRANSFORMERS
import ssmscope
from ssmscope.zoo.entries import ENTRIES

PACKAGE = Path(ssmscope.__file__).parent
CODE = """
import importlib, io, json, sys
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, sys.argv.pop(1))
import ssmscope
from ssmscope.cli import run
from ssmscope.core.known_models import readable_types

here = Path(ssmscope.__file__).parent
for file in sorted(here.rglob("*.py")):
    parts = file.relative_to(here.parent).with_suffix("").parts
    if parts[-1] != "__main__" and "backends" not in parts:
        try:
            importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        except (ImportError, ssmscope.InputError) as error:
            if (getattr(error, "name", None) or "").startswith("ssmscope"):
                raise  # Others are of libraries that are not there.
said = io.StringIO()
with redirect_stdout(said):
    code = run(["--help"])
model = ssmscope.load("demo/sst2-mamba2")
trace = model.trace("a gripping film")
scores = ssmscope.heatmap(trace)
found = {
    "home": str(here), "help": said.getvalue(), "code": code, "types": readable_types(), "names": ssmscope.__all__,
    "heatmap": scores.texts[0].scores.tolist(), "bound": ssmscope.bound(model, length=8).to_dict()["kind"],
}
try:
    ssmscope.load("demo/BALEEN")
except ssmscope.InputError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""
BALEEN = "sst2-baleen-e"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What the copy answers."""
    copy = tmp_path_factory.mktemp("copy") / "ssmscope"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("zoo"))
    done = TRANSFORMERS.run(CODE.replace("BALEEN", BALEEN), copy.parent, cwd=copy.parent)
    assert done.returncode == 0, done.stderr
    answered = json.loads(done.stdout.splitlines()[-1])
    assert answered["home"] == str(copy)
    return answered


def test_it_answers_as_the_whole_package_does(found):
    trace = ssmscope.load("demo/sst2-mamba2").trace("a gripping film")
    assert found["heatmap"] == ssmscope.heatmap(trace).texts[0].scores.tolist()
    assert found["bound"] == "bound" and found["code"] == 0


def test_nothing_of_the_zoo_is_named(found):
    types, verbs = ENTRIES["ssmscope.models"], ENTRIES["ssmscope.verbs"]
    assert len(types) == 9 and not {*types} & {*found["types"]} and {"mamba2", "ssm-gla"} < {*found["types"]}
    assert [*verbs] == ["train"] and "train" not in found["names"] and "heatmap" in found["names"]
    assert " train " not in found["help"] and " models " in found["help"]


def test_a_model_of_the_zoo_is_refused_in_one_line(found):
    assert "baleen-mamba2" in found["refused"] and "unknown" in found["refused"] and "\n" not in found["refused"]
