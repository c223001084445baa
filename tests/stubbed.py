"""Stands for what mamba_ssm imports and is not installed, so that its own classes can be built where there is no GPU.
python stubbed.py DIRECTORY loads its language models in memory, as ssmscope reads them, and compares Mamba-1 and 2 with
their own forward passes, in which the package's references in torch stand for its kernels."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
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
    def __init__(self, missing):
        self.missing = missing

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.missing:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module): ...


def use_references() -> None:
    """Let mamba_ssm's layers call its own references."""
    from mamba_ssm.modules import mamba2, mamba_simple
    from mamba_ssm.ops import selective_scan_interface as interface
    from mamba_ssm.ops.triton import layer_norm, layernorm_gated, ssd_combined

    def scan(x, dt, A, B, C, chunk_size, *, D, z, dt_bias, dt_softplus, dt_limit=(0.0, float("inf")), **_):
        return ssd_combined.ssd_selective_scan(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit)

    def norm(x, weight, bias, eps, **_):
        return layer_norm.rms_norm_ref(x, weight, bias, eps=eps)

    mamba_simple.selective_scan_fn = interface.selective_scan_fn = interface.selective_scan_ref
    mamba2.mamba_chunk_scan_combined, layer_norm.rms_norm_fn = scan, norm
    layernorm_gated.rmsnorm_fn = layernorm_gated.rms_norm_ref
    mamba_simple.causal_conv1d_fn = mamba2.causal_conv1d_fn = None


def main(directory: str) -> None:
    missing = [name for name in COMPILED if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, Finder(missing))
    sys.path.insert(0, directory)
    import torch
    from mamba_ssm.models import mixer_seq_simple
    from mamba_ssm.models.config_mamba import MambaConfig
    import ssmscope

    use_references()
    second = {"layer": "Mamba2", "d_state": 8, "headdim": 8, "chunk_size": 16, "use_mem_eff_path": False}
    third = {"layer": "Mamba3", "d_state": 16, "headdim": 8, "chunk_size": 16}
    attention = {"attn_layer_idx": [1], "attn_cfg": {"num_heads": 3, "causal": True, "d_conv": 4}, "d_intermediate": 32}
    torch.manual_seed(0)
    kinds = [({"use_fast_path": False}, {}), (second, {}), (second, attention), (third, {})]
    if "Mamba3" not in inspect.getsource(mixer_seq_simple.create_block):  # 2.3.2 has its layer alone.
        kinds.pop()
    for layer, beside in kinds:
        config = MambaConfig(d_model=24, n_layer=2, vocab_size=97, ssm_cfg=layer, fused_add_norm=False, **beside)
        theirs = mixer_seq_simple.MambaLMHeadModel(config)
        with torch.no_grad():
            for weight in theirs.parameters():  # As initialised, the recurrence hardly shows in the logits.
                weight += 0.2 * torch.randn_like(weight)
        model = ssmscope.load(theirs)
        batch = model.encode(ids=[[5, 17, 3, 9], [7, 8]])
        with tempfile.TemporaryDirectory() as saved:
            theirs.save_pretrained(saved)
            stored = ssmscope.load(saved)
        found = model.logits(batch)
        assert torch.equal(found, stored.logits(batch)) and model.fingerprint == stored.fingerprint
        assert {id(p) for p in model.module.parameters()} == {id(p) for p in theirs.parameters()}
        if not beside and layer is not third:
            with torch.no_grad():
                own = theirs(batch.input_ids[:1]).logits
            torch.testing.assert_close(found[0, :4], own[0], rtol=1e-4, atol=1e-4)
            print(layer.get("layer", "Mamba1"), "off by", float((found[0, :4] - own[0]).abs().max()), file=sys.stderr)
    print("as stored")


if __name__ == "__main__":
    main(sys.argv[1])
