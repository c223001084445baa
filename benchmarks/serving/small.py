"""A random model of transformers from a configuration's fields or a model type, and the greedy text that it writes."""

import json
import sys

import torch
import transformers


def network():
    given = sys.argv[1] if sys.argv[1].startswith("{") else json.dumps({"model_type": sys.argv[1]})
    fields = {"use_cache": True, **json.loads(given), "dtype": "float32"}
    torch.manual_seed(0)
    kind = transformers.CONFIG_MAPPING[fields.pop("model_type")]
    return transformers.AutoModelForCausalLM.from_config(kind.from_dict(fields)).eval()


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
