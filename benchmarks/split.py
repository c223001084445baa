"""A sharded directory over two devices: the same numbers as on one.

    python benchmarks/split.py --into /tmp/split                            # two GPUs, and a GPU with the CPU
    python benchmarks/split.py --into /tmp/split --devices cuda:0 cuda:0    # one GPU with the CPU

A model of each family with random weights is saved in shards and loaded whole on the first GPU, in float32, then with
each `device_map`. Printed is the largest difference from that relative to the largest value, and after a slash that
from the same model in float64 there, of logits, logits of a run from a state, the logit lens, survival of every layer,
the implicit attention of the middle layer, relevance and gradient × input; and which devices hold it.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
import ssmscope
from ssmscope.core.model import Model
from ssmscope.interp.methods.gradients import gradxinput
from ssmscope.interp.methods.lrp import lrp
from ssmscope.interp.objective import objective
from ssmscope.probes.lens.lenses import chosen_states, logit_lens


def mamba(width: int, layers: int) -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM, MambaConfig(hidden_size=width, num_hidden_layers=layers, vocab_size=50280)


def mamba2(width: int, layers: int) -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    heads = dict(num_heads=2 * width // 64, head_dim=64, n_groups=1, state_size=128)
    return Mamba2ForCausalLM, Mamba2Config(hidden_size=width, num_hidden_layers=layers, vocab_size=50280, **heads)


def bamba(width: int, layers: int) -> Any:
    from transformers import BambaConfig, BambaForCausalLM

    sizes = dict(hidden_size=width, num_hidden_layers=layers, intermediate_size=3 * width, vocab_size=50280)
    heads = dict(num_attention_heads=width // 64, num_key_value_heads=width // 128, attn_layer_indices=[layers // 2])
    mamba = dict(mamba_n_heads=2 * width // 64, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128)
    return BambaForCausalLM, BambaConfig(**sizes, **heads, **mamba)


MODELS: dict[str, Callable[[int, int], Any]] = {"mamba": mamba, "mamba2": mamba2, "bamba": bamba}


def halves(directory: Path, layers: int, first: Any, second: Any) -> dict[str, Any]:
    """The first half of the layers and the embeddings on one device, all after them on another."""
    model = ssmscope.load(directory)
    base, name = model.module.base_model, model.module.base_model_prefix
    found: dict[str, Any] = {}
    for part, inside in base.named_children():
        if part == "layers":
            found |= {f"{name}.layers.{i}": first if i < layers // 2 else second for i in range(layers)}
        else:
            found[f"{name}.{part}"] = first if isinstance(inside, torch.nn.Embedding) else second
    return found | {"lm_head": first if model.config.tie_word_embeddings else second}


def answers(model: Model, ids: list[list[int]]) -> dict[str, Callable[[], Tensor]]:
    def attention() -> Tensor:
        middle = model.num_layers // 2
        trace = model.trace(model.encode(ids=ids[:1]), keep_inputs=[middle])
        return trace.linearized[middle].attention("block")

    def heatmap() -> Tensor:
        found = ssmscope.heatmap(model, model.encode(ids=ids))
        return torch.cat([torch.from_numpy(text.scores).flatten() for text in found])

    def continued() -> Tensor:
        begin, rest = (model.encode(ids=part) for part in (ids[0][:100], ids[0][100:]))
        return model.run(rest, model.run(begin).states).logits

    asked = objective(model, model.encode(ids=ids), target=7)
    return {
        "logits": lambda: model.logits(model.encode(ids=ids)),
        "run from a state": continued,
        "lens": lambda: logit_lens(model).log_probs(chosen_states(model, model.encode(ids=ids), "last")),
        "heatmap": heatmap,
        "attention": attention,
        "lrp": lambda: lrp(asked).scores,
        "gradxinput": lambda: gradxinput(asked).scores,
    }


def relative(found: Tensor, expected: Tensor) -> str:
    return f"{((found - expected).abs().max() / expected.abs().max()).item():.1e}"


def told(
    kind: str, how: str, model: Model, ids: list[list[int]], whole: dict[str, Tensor], exact: dict[str, Tensor]
) -> dict[str, Tensor]:
    where = Counter(str(weight.device) for weight in model.module.parameters())
    cells, found = [], dict[str, Tensor]()
    for name, ask in answers(model, ids).items():
        start = time.perf_counter()
        try:
            found[name] = ask().double().cpu()
        except (RuntimeError, ValueError) as error:  # of one question; the others are still asked
            cells.append(f"{type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        apart = [relative(found[name], one[name]) for one in (whole, exact) if name in one]
        cells.append(f"{' / '.join(apart)} ({time.perf_counter() - start:.1f} s)")
    places = ", ".join(f"{count} on {device}" for device, count in sorted(where.items()))
    print(f"| {kind} | {how} | {places} | " + " | ".join(cells) + f" | {model.fingerprint[:12]} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="where the directories are written")
    parser.add_argument("--kinds", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--shards", default="500MB", help="the largest size of one")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    options = parser.parse_args()
    first, second = options.devices
    drawn = torch.Generator().manual_seed(1)
    ids = [torch.randint(5, 50280, (length,), generator=drawn).tolist() for length in (256, 180)]
    names = ("logits", "run from a state", "lens", "heatmap", "attention", "lrp", "gradxinput")
    print(f"torch {torch.__version__}, {options.layers} layers of width {options.width}, float32\n")
    print("| model | device_map | parameters | " + " | ".join(names) + " | fingerprint |")
    print("|---|---|---|" + "---|" * len(names) + "---|", flush=True)
    for kind in options.kinds:
        built, config = MODELS[kind](options.width, options.layers)
        torch.manual_seed(0)
        directory = options.into / kind
        with torch.device(first):
            module = built(config)
        module.save_pretrained(directory, max_shard_size=options.shards)
        del module
        shards = len(list(directory.glob("*.safetensors")))
        by_float64 = ssmscope.load(directory, device=first, dtype="float64")
        exact = told(kind, "whole, float64", by_float64, ids, {}, {})
        whole = told(kind, f"whole, {shards} shards", ssmscope.load(directory, device=first), ids, {}, exact)
        maps: dict[str, Any] = {} if first == second else {"balanced": "balanced", "auto": "auto"}
        for one, other in dict.fromkeys([(first, second), (first, "cpu"), ("cpu", first)]):
            if one != other:
                maps[f"halves, {one} and {other}"] = halves(directory, options.layers, one, other)
        for how, device_map in maps.items():
            try:
                model = ssmscope.load(directory, device_map=device_map, dtype="float32")
            except (RuntimeError, ValueError) as error:
                print(f"| {kind} | {how} | not loaded, {type(error).__name__}: {error} |", flush=True)
                continue
            told(kind, how, model, ids, whole, exact)
            del model


if __name__ == "__main__":
    main()
