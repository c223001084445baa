"""Helpers of benchmarks: threads, a line about the machine, seconds."""

from __future__ import annotations

import os
import platform

import torch

THREADS = 2


class Seconds(float):
    """Seconds that a benchmark timed itself."""


def machine() -> str:
    """One line on what the numbers were measured on."""
    import transformers

    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, float32"
    )
