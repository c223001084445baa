"""Models of 1 to 32 billion parameters in bfloat16 on one GPU: seconds and peak memory of what is asked of them.

    python benchmarks/large.py --shape falcon --what heatmap attention lrp:256
    python benchmarks/large.py --shape codestral --what ig lrp gradxinput forward

Weights are random, drawn on the GPU as their library initialises them but for a standard deviation of 0.02, and so is
the text. Every answer is asked for twice: the first call of the process has kernels to compile and weights to hash. The
peak is what torch holds at most, weights included. Beside `forward` stands the library's own forward pass without
optional kernels, and with --peer beside `gradxinput` the gradient through it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import ssmscope
from ssmscope.interp.methods.gradients import gradxinput
from ssmscope.interp.methods.integrated import ig
from ssmscope.interp.methods.lrp import lrp
from ssmscope.interp.objective import objective
from ssmscope.model import Model

LENGTHS = {
    "heatmap": 8192,
    "retention": 8192,
    "attention": 2048,
    "ig": 256,
    "lrp": 2048,
    "gradxinput": 256,
    "forward": 512,
}


def falcon() -> Any:
    """Falcon-Mamba-7B."""
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    sizes = dict(hidden_size=4096, num_hidden_layers=64, state_size=16, time_step_rank=256, vocab_size=65024)
    return FalconMambaForCausalLM, FalconMambaConfig(**sizes, tie_word_embeddings=False)


def codestral() -> Any:
    """Mamba-Codestral-7B."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = dict(hidden_size=4096, num_hidden_layers=64, num_heads=128, head_dim=64, state_size=128, n_groups=8)
    return Mamba2ForCausalLM, Mamba2Config(**sizes, vocab_size=32768, tie_word_embeddings=False)


def bamba() -> Any:
    """Bamba-9B: 29 layers of Mamba-2 and three of attention, with feed-forward parts."""
    from transformers import BambaConfig, BambaForCausalLM

    sizes = dict(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, vocab_size=128256)
    heads = dict(num_attention_heads=32, num_key_value_heads=8, attn_layer_indices=[9, 18, 27])
    mamba = dict(mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=256, mamba_expand=2)
    return BambaForCausalLM, BambaConfig(**sizes, **heads, **mamba, tie_word_embeddings=False)


def jamba() -> Any:
    """Jamba's blocks with four experts in place of sixteen."""
    from transformers import JambaConfig, JambaForCausalLM

    sizes = dict(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, vocab_size=65536, num_experts=4)
    heads = dict(num_attention_heads=32, num_key_value_heads=8)
    return JambaForCausalLM, JambaConfig(**sizes, **heads, mamba_dt_rank=256, use_mamba_kernels=False)


def mamba_790m() -> Any:
    """mamba-790m."""
    from transformers import MambaConfig, MambaForCausalLM

    sizes = dict(hidden_size=1536, num_hidden_layers=48, state_size=16, time_step_rank=96, vocab_size=50280)
    return MambaForCausalLM, MambaConfig(**sizes)


def nemotron() -> Any:
    """Nemotron-H-8B: 24 layers of Mamba-2, 4 of attention, 24 feed-forward."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    kinds = {"M": "mamba", "-": "mlp", "*": "attention"}
    layers = [kinds[kind] for kind in "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-"]
    sizes = dict(hidden_size=4096, intermediate_size=21504, vocab_size=131072, layers_block_type=layers)
    heads = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    mamba = dict(mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8)
    return NemotronHForCausalLM, NemotronHConfig(**sizes, **heads, **mamba)


def granite() -> Any:
    """Granite-4.0-H-Small: 36 layers of Mamba-2 and four of attention, each with 72 experts."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    layers = ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)]
    sizes = dict(hidden_size=4096, num_hidden_layers=40, layer_types=layers, vocab_size=100352)
    heads = dict(num_attention_heads=32, num_key_value_heads=8)
    mamba = dict(mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1)
    experts = dict(num_local_experts=72, num_experts_per_tok=10, intermediate_size=768, shared_intermediate_size=1536)
    scales = dict(embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=1 / 128, logits_scaling=16)
    return GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig(**sizes, **heads, **mamba, **experts, **scales)


def falcon_h1() -> Any:
    """Falcon-H1-7B without its multipliers."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    sizes = dict(hidden_size=3072, num_hidden_layers=44, intermediate_size=12288, vocab_size=130048)
    heads = dict(num_attention_heads=12, num_key_value_heads=2, head_dim=128)
    mamba = dict(mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128, mamba_d_state=256, mamba_n_groups=1)
    return FalconH1ForCausalLM, FalconH1Config(**sizes, **heads, **mamba)


def qwen() -> Any:
    """Qwen3-Next-80B-A3B with 64 experts in place of 512: 36 layers of the gated delta rule and 12 of attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM, Qwen3NextConfig(num_experts=64)


SHAPES = {
    **{"falcon": falcon, "codestral": codestral, "bamba": bamba, "jamba": jamba, "790m": mamba_790m},
    **{"nemotron": nemotron, "granite": granite, "falcon-h1": falcon_h1, "qwen": qwen},
}


def built(
    shape: str, dtype: torch.dtype, device: str, layers: int | None = None, *, residual_scaled: bool = False
) -> Model:
    """A random model of a shape, drawn where it is to be; `residual_scaled`, what its mixers add to the residual stream
    is divided by the root of how many they are, as Mamba's authors begin training."""
    kind, config = SHAPES[shape]()
    config.initializer_range = 0.02
    config.num_hidden_layers = layers or config.num_hidden_layers
    torch.manual_seed(0)
    with torch.device(device):
        module = kind._from_config(config, dtype=dtype).eval()
    module.requires_grad_(False)
    model = ssmscope.load(module)
    for mixer in model.mixers if residual_scaled else ():
        mixer.out_proj.weight.div_(model.num_layers**0.5)
    return model


def asked(model: Model, what: str, length: int, options: argparse.Namespace) -> Callable[[], str]:
    """What is timed; it returns what is said beside its time."""
    ids = torch.randint(5, model.vocabulary, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = model.encode(ids=ids)
    if what == "forward":
        return lambda: _said(model.run(batch, last_only=True))
    if what == "heatmap":
        return lambda: _said(ssmscope.selection_heatmap(model, batch))
    if what == "retention":
        return lambda: _said(model.trace(batch, keep_inputs=False))
    if what == "attention":
        trace = model.trace(batch, keep_inputs=[model.num_layers // 2])
        return lambda: _said(trace.frozen[model.num_layers // 2].attention("block"))
    found = objective(model, batch)
    if what == "gradxinput":
        return lambda: _said(gradxinput(found))
    if what == "lrp":
        return lambda: f"delta {float(lrp(found).delta[0]):.1e}"

    def integrated() -> str:
        scores = ig(found, cap=options.cap)
        return f"{int(scores.steps[0])} gradients, error {float(scores.error[0]):.2g}"

    return integrated


def _said(_: Any) -> str:
    return ""


def theirs(model: Model, what: str, length: int) -> Callable[[], str]:
    """The same by the library's own forward pass and autograd."""
    module = model.module
    ids = torch.randint(5, model.vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    if what == "forward":
        return torch.no_grad()(lambda: _said(module(ids, use_cache=False)))

    def gradient() -> str:
        inputs = module.get_input_embeddings()(ids).detach().requires_grad_()
        hidden = module.base_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        module.get_output_embeddings()(hidden[:, -1])[:, 0].sum().backward()
        return ""

    return gradient


def timed(label: str, run: Callable[[], str], device: torch.device, repeats: int) -> None:
    """Prints the seconds of the first call and the best of those after, and the peak of these."""

    def once() -> tuple[float, str]:
        _synchronise(device)
        start = time.perf_counter()
        said = run()
        _synchronise(device)
        return time.perf_counter() - start, said

    try:
        first, said = once()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        after = min((once()[0] for _ in range(repeats)), default=float("nan"))
    except torch.OutOfMemoryError as error:
        print(f"{label}: out of memory ({str(error).splitlines()[0][:80]})", flush=True)
        return
    peak = f", peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB" if device.type == "cuda" else ""
    print(f"{label}: first {first:.2f} s, then {after:.3f} s{peak}{', ' if said else ''}{said}", flush=True)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _question(text: str) -> tuple[str, int]:
    """What is asked, and of how many tokens, from `lrp` or `lrp:256`."""
    what, _, length = text.partition(":")
    if what not in LENGTHS:
        raise argparse.ArgumentTypeError(f"{what!r} is none of {', '.join(LENGTHS)}")
    return what, int(length or LENGTHS[what])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="falcon")
    parser.add_argument("--what", nargs="+", type=_question, default=[_question("heatmap")], help=", ".join(LENGTHS))
    parser.add_argument("--layers", type=int, help="so many layers only")
    parser.add_argument("--cap", type=int, default=1500, help="the most gradients of ig")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--residual-scaled", action="store_true", help="smaller out_proj, as trained models begin")
    parser.add_argument("--peer", action="store_true", help="the library's own gradient too")
    parser.add_argument("--profile", action="store_true", help="which operations the last call spends its time in")
    options = parser.parse_args()
    begun = time.perf_counter()
    dtype, scaled = getattr(torch, options.dtype), options.residual_scaled
    model = built(options.shape, dtype, options.device, options.layers, residual_scaled=scaled)
    device, parameters = model.device, sum(p.numel() for p in model.module.parameters())
    _synchronise(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    said = f"{options.shape}, {parameters / 1e9:.2f} billion parameters in {options.dtype}, {where}"
    print(f"{said}, torch {torch.__version__}, built in {time.perf_counter() - begun:.1f} s", flush=True)
    for what, length in options.what:
        run = asked(model, what, length, options)
        timed(f"{options.shape} {what} {length}", run, device, options.repeats)
        if options.profile:
            _profiled(run, device)
        if what == "forward" or (options.peer and what == "gradxinput"):
            timed(f"{options.shape} {what} {length}, transformers", theirs(model, what, length), device, 1)


def _profiled(run: Callable[[], str], device: torch.device) -> None:
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds) as seen:
        run()
        _synchronise(device)
    by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    for event in sorted(seen.key_averages(), key=lambda event: -getattr(event, by.replace("cuda", "device")))[:14]:
        spent = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        print(f"    {spent / 1e3:9.1f} ms {event.count:6d} × {event.key[:90]}", flush=True)


if __name__ == "__main__":
    main()
