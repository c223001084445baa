"""Runs that are killed at some point, as by a machine that goes down."""

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from warm import TRANSFORMERS

TRAIN = """
import json, sys
from ssmscope.zoo.training import train_model
train_model(*json.loads(sys.argv[1]), **json.loads(sys.argv[2]))
"""


def killed(script: str, arguments: Sequence[str], state: Path, reached: Callable[[dict[str, Any]], bool]) -> dict:
    """Kill a process once the checkpoint that it writes to `state` has `reached` a point; its last checkpoint."""
    process = TRANSFORMERS.start(script, *arguments)
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if state.exists() and reached(torch.load(state, weights_only=True)):
                break
            time.sleep(0.005)
        assert process.poll() is None, "the run ended before it could be killed"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return torch.load(state, weights_only=True)


def killed_training(architecture: str, data: str, out: Path, options: Mapping[str, Any]) -> str:
    """Kill a training in its second epoch; return its output when it continues."""
    state = out / "checkpoint" / "state.pt"
    given = [json.dumps([architecture, data, str(out)]), json.dumps(options)]
    last = killed(TRAIN, given, state, lambda saved: (saved["epoch"], saved["step"]) >= (1, 3))
    assert not (out / "training.json").exists()
    return f"continuing in epoch {last['epoch'] + 1} after {last['step']} steps"
