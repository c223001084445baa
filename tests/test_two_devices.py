"""Questions to models with one half on another device."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from exhaustive import few
from torch.utils import backend_registration
from warm import TRANSFORMERS

pytest.importorskip("accelerate")
SCRIPT = "import runpy, sys; sys.path.insert(1, sys.argv.pop(1)); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
HALVED = few(("mamba", "mamba2", "bamba", "qwen3_next", "jamba", "rwkv", "diff-mamba", "gla"), "qwen3_next")


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="torch has no such devices"
)
def test_halves_on_two_devices_give_the_numbers_of_one():
    """GroupMamba's modules read each other's states, and are refused."""
    script = Path(__file__).with_name("two_devices.py")
    run = TRANSFORMERS.run(SCRIPT, script.parent, script, *HALVED, "groupmamba")
    assert run.returncode == 0, run.stderr
    found = defaultdict(list)
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            found[said["model"]].append(said)
    refused = {said["error"] for said in found.pop("groupmamba")}
    assert refused == {"the modules of a group attend to each other's states: load a GroupMamba on one device"}
    assert set(found) == set(HALVED)
    for name, answers in found.items():
        assert len(answers) == 18, name  # nine questions, each half on either device
        for said in answers:
            assert said.get("apart", 1) < 1e-5, said
