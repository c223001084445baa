"""Puts the C kernels into a wheel where SSMSCOPE_KERNELS=1 asks for it, for each level of processors that there is: its
user needs no compiler. Other wheels, and the source distribution, hold the sources, which are compiled on first use.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = {
    "scan": "scans/native.c",
    "scan-of-heads": "scans/scalar.c",
    "passes": "scans/passes.c",
    "attention": "matrices/native.c",
}
"""The kernels' names in `Library`, and their sources."""


class Kernels(BuildHookInterface):
    """Hatchling's hook of this name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("SSMSCOPE_KERNELS") != "1" or version == "editable":
            return
        package = Path(self.root, "ssmscope")
        spec = importlib.util.spec_from_file_location("building", package / "scans" / "building.py")
        assert spec is not None and spec.loader is not None
        building = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(building)
        self.made = tempfile.TemporaryDirectory(prefix="kernels-")
        for level in building.LEVELS:
            for name, source in SOURCES.items():
                file = Path(self.made.name, building.file_of(package / source, name, level))
                choices = [(f"-march={level}", "-fopenmp")]
                building._compile(building._compiler(), package / source, name, file, choices)
                build_data["force_include"][str(file)] = f"ssmscope/scans/brought/{file.name}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "made"):
            self.made.cleanup()
