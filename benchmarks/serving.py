"""Families that transformers computes alike in every mode in which it serves: `analyze parity --self` of small random
models, and for each mode that differs a script that shows it without ssmscope.

    python benchmarks/serving.py [FAMILY ...]    adds the installed release to results/serving.jsonl
    python benchmarks/serving.py --libraries     adds mamba_ssm and flash-linear-attention, on a GPU
    python benchmarks/serving.py --table         prints the table of the page of `parity`

Run from the checkout, once with release 4 of transformers and once with release 5.
"""

from __future__ import annotations

import importlib
import io
import json
import runpy
import sys
import tempfile
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "serving.jsonl"
MODES = {
    "one pass": "one pass",
    "one pass in bfloat16": "bfloat16",
    "right padding, alone": "right pad",
    "right padding, in a batch": "in a batch",
    "left padding, alone": "left pad",
    "left padding, in a batch": "in a batch",
    "cached steps": "steps",
    "cached steps, in a batch": "in a batch",
    "prefill in chunks": "chunks",
    "a prefix reused": "prefix",
}
"""Modes, and the heads of their columns."""
SCRIPTS = {
    "one": "chunk_size",
    "right": "chunk_size",
    "left": "left_padding",
    "cached": "cached_steps",
    "prefill": "chunks",
    "a": "prefix",
}
"""Script in `serving/` by the first word of a mode."""


SECOND: dict[str, Any] = {"layer": "Mamba2", "d_state": 32, "headdim": 32}
MAMBA_SSM: dict[str, dict[str, Any]] = {
    "mamba": {"layer": "Mamba1", "d_state": 16},
    "mamba2": SECOND,
    "mamba2-groups": {**SECOND, "ngroups": 2},
    "mamba2-limit": {**SECOND, "dt_limit": [0.01, 0.1]},
}
"""`ssm_cfg` of random models of mamba_ssm."""
BY_HEADS: dict[str, Any] = {"num_heads": 2, "head_dim": 64}
FLA: dict[str, dict[str, Any]] = {
    **{"GLA": {"num_heads": 2}, "DeltaNet": {"num_heads": 2}, "GatedDeltaNet": BY_HEADS, "KDA": BY_HEADS},
    **{"Comba": BY_HEADS, "RetNet": {"num_heads": 2}, "RWKV7": {"head_dim": 64}, "HGRN": {}, "HGRN2": {"num_heads": 2}},
    **{"GSA": {"num_heads": 2, "num_slots": 32}, "GatedDeltaProduct": {**BY_HEADS, "num_householder": 1}},
    "Mamba2": {"state_size": 32, "head_dim": 32, "num_heads": 8, "n_groups": 1},
}
"""Fields of random models of flash-linear-attention."""


def libraries() -> None:
    """Add what mamba_ssm and flash-linear-attention compute of small random models on a GPU."""
    import torch
    import ssmscope

    def add(library: str, name: str, module: Any) -> None:
        torch.manual_seed(0)
        for weight in module.parameters():
            if library == "mamba_ssm" and weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.7 * weight.shape[1] ** -0.5)
        with tempfile.TemporaryDirectory() as folder:
            module.save_pretrained(folder)
            try:
                found = ssmscope.parity(ssmscope.load(folder, device="cuda"), self_=True).tensors
            except ssmscope.InputError as error:
                return print(name, error)
        release = f"{library} {version(library)}, {torch.cuda.get_device_name()}"
        row = {
            "transformers": release,
            "family": name.partition("-")[0].lower(),
            "model": name,
            "modes": modes_of(found),
        }
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    config, served = (importlib.import_module(f"mamba_ssm.models.{n}") for n in ("config_mamba", "mixer_seq_simple"))
    for name, cfg in MAMBA_SSM.items():
        sizes = {"d_model": 128, "n_layer": 3, "vocab_size": 96, "tie_embeddings": False, "ssm_cfg": cfg}
        add("mamba_ssm", name, served.MambaLMHeadModel(config.MambaConfig(**sizes), device="cuda"))
    fla = importlib.import_module("fla.models")
    for name, cfg in FLA.items():
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "num_hidden_layers": 3, "vocab_size": 96, "initializer_range": 0.1}
        add("fla-core", name, getattr(fla, f"{name}ForCausalLM")(getattr(fla, f"{name}Config")(**sizes, **cfg)))


def modes_of(found: Any) -> dict[str, dict[str, float]]:
    """Return the error of each mode, and what rounding allows, by its name."""
    rounded = ((each.name, {"error": f"{each.error:.2g}", "allowed": f"{each.allowed:.2g}"}) for each in found)
    return {name.removeprefix("logits of "): {k: float(v) for k, v in each.items()} for name, each in rounded}


def main(only: list[str]) -> None:
    sys.path[:0] = [str(HERE.parent / "tests"), str(HERE / "serving")]
    import torch
    import transformers
    from small_models import SMALL_MODELS
    import ssmscope

    for family, make in SMALL_MODELS.items():
        torch.manual_seed(0)
        for name, module in make().items() if not only or family in only else ():
            if not type(module).__module__.startswith("transformers.") or not hasattr(module, "generate"):
                continue
            found = ssmscope.parity(ssmscope.load(module.eval()), self_=True).tensors
            modes: dict[str, Any] = modes_of(found)
            own = {**module.config.to_diff_dict(), "model_type": module.config.model_type}
            fields = json.loads(json.dumps(own, default=str))
            for each in found:
                if each.over:
                    mode = each.name.removeprefix("logits of ")
                    modes[mode]["without"] = alone(mode, fields)
            row = {"transformers": transformers.__version__, "family": family, "model": name, "modes": modes}
            row |= {"configuration": fields} if any("without" in each for each in modes.values()) else {}
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(name, {mode: each for mode, each in modes.items() if "without" in each})


def alone(mode: str, fields: dict[str, Any]) -> float:
    """Return the difference that the mode's script prints for a configuration."""
    script = HERE / "serving" / f"{SCRIPTS[mode.partition(' ')[0]]}.py"
    sys.argv[1:] = [json.dumps(fields), *["2"] * mode.endswith("in a batch")]
    said = io.StringIO()
    with redirect_stdout(said):
        runpy.run_path(str(script))
    return float(f"{float(said.getvalue().split()[-1]):.2g}")


def rows() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the models' modes by family and release; the last run of a model counts."""
    latest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        latest[row["family"], row["transformers"], row["model"]] = row["modes"]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for (family, release, _), modes in latest.items():
        found.setdefault(family, {}).setdefault(release, []).append(modes)
    return found


def docs_table() -> list[str]:
    """Return the table of the page: a row per family and release, with the largest error of its models that differ."""
    lines = [f"| family | release | {' | '.join(MODES.values())} |", "|---|---|" + "---|" * len(MODES)]
    for family, releases in sorted(rows().items()):
        for release, models in sorted(releases.items()):
            cells = []
            for mode in MODES:
                each = [modes[mode] for modes in models if mode in modes]
                over = [one["error"] for one in each if one["error"] > one["allowed"]]
                cells.append(f"**{max(over):.0e}**" if over else "=" if each else "–")
            lines.append(f"| {family} | {release} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print("\n".join(docs_table()))
    elif sys.argv[1:] == ["--libraries"]:
        libraries()
    else:
        main(sys.argv[1:])
