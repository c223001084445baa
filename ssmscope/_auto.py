"""Makes transformers' Auto classes know our model types without importing transformers before anyone needs it.

Importing `ssmscope.models` registers them. That is done at once where transformers is already there, and
otherwise right after somebody imports it. The modules below `ssmscope.models` (errors, ssm, trace, model) do not
import transformers at their top: while one of them was being imported, `ssmscope.models` could not be.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_with_transformers() -> None:
    """Import `ssmscope.models` now if transformers is imported, else as soon as it is."""
    if "transformers" in sys.modules:
        _import_models()
    elif not any(isinstance(finder, _AfterTransformers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTransformers())


def _import_models() -> None:
    # When ssmscope.models is what imports transformers, it is already on its way.
    if "ssmscope.models" not in sys.modules:
        importlib.import_module("ssmscope.models")


class _AfterTransformers(MetaPathFinder):
    """Finds transformers as the other finders do, and has its loader import `ssmscope.models` after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def execute_then_register(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            _import_models()

        loader.exec_module = execute_then_register  # type: ignore[method-assign]
        return spec
