"""Stands for the compiled parts of mamba_ssm, so that its own classes can be built where there is no GPU.

python stubbed.py DIRECTORY loads its language models in memory, as ssmscope reads them; nothing of it is run.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import tempfile
import types
from typing import Any

COMPILED = ("triton", "tilelang", "selective_scan_cuda", "cutlass", "cuda", "quack", "tvm_ffi", "tvm")


class Anything:
    """Object that takes any call, item, comparison and sum at import."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        return Anything()

    def __le__(self, other: Any) -> bool:
        return True

    def __iter__(self):
        return iter((Anything(),))

    __lt__ = __ge__ = __gt__ = __le__
    __getitem__ = __or__ = __ror__ = __mul__ = __rmul__ = __add__ = __radd__ = __call__


class Stub(types.ModuleType):
    __path__: list[str] = []
    __version__ = "3.0.0"
    __getattr__ = Anything.__getattr__


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in COMPILED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module): ...


def main(directory: str) -> None:
    sys.meta_path.insert(0, Finder())
    sys.path.insert(0, directory)
    import torch
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    import ssmscope

    second = {"layer": "Mamba2", "d_state": 8, "headdim": 8, "chunk_size": 16}
    attention = {"attn_layer_idx": [1], "attn_cfg": {"num_heads": 3, "causal": True, "d_conv": 4}, "d_intermediate": 32}
    for layer, beside in (({}, {}), (second, {}), (second, attention)):
        config = MambaConfig(d_model=24, n_layer=2, vocab_size=97, ssm_cfg=layer, fused_add_norm=False, **beside)
        theirs = MambaLMHeadModel(config)
        model = ssmscope.load(theirs)
        batch = model.encode(ids=[[5, 17, 3, 9], [7, 8]])
        with tempfile.TemporaryDirectory() as saved:
            theirs.save_pretrained(saved)
            stored = ssmscope.load(saved)
        assert torch.equal(model.logits(batch), stored.logits(batch)) and model.fingerprint == stored.fingerprint
        assert {id(p) for p in model.module.parameters()} == {id(p) for p in theirs.parameters()}
    print("as stored")


if __name__ == "__main__":
    main(sys.argv[1])
