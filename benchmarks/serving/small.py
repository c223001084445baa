"""A random model of transformers, from a configuration's fields or by its name in `results/serving.jsonl`, and the
greedy text that it writes."""

import json
import sys
from pathlib import Path

import torch
import transformers


def fields(name):
    release = transformers.__version__.partition(".")[0]
    rows = map(json.loads, Path(__file__).parents[1].joinpath("results", "serving.jsonl").open(encoding="utf-8"))
    found = {row["model"]: row.get("configuration") for row in rows if row["transformers"].startswith(f"{release}.")}
    return found.get(name) or sys.exit(f"give one of {', '.join(key for key, value in found.items() if value)}")


def network():
    given = json.loads(sys.argv[1]) if sys.argv[1].startswith("{") else fields(sys.argv[1])
    known = {"use_cache": True, **given, "dtype": "float32"}
    torch.manual_seed(0)
    kind = transformers.CONFIG_MAPPING[known.pop("model_type")]
    return transformers.AutoModelForCausalLM.from_config(kind.from_dict(known)).eval()


def texts(count):
    return torch.randint(5, 90, (count, 37), generator=torch.Generator().manual_seed(1))


def written(model, ids, mask, skip=0, **how):
    """Return the largest difference of a first text's next-token logits from one pass / their standard deviation."""
    kept = dict(return_dict_in_generate=True, output_logits=True, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=24, **{"use_cache": True, **kept, **how}
        )
        plain = network()(input_ids=out.sequences[:1, skip:-1], use_cache=False).logits[0, -24:]
    found = torch.stack([logits[0] for logits in out.logits])
    return ((found - plain).abs().max() / plain.std()).item()
