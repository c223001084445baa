"""A text continued from the cache of its first 16 tokens against one pass: python prefix.py MODEL"""

import inspect

import torch
from small import network, texts

model, ids = network(), texts(1)
places, known = torch.arange(16, 37), inspect.signature(model.forward).parameters
more = {"attention_mask": torch.ones_like(ids), "position_ids": places[None], "cache_position": places}
with torch.no_grad():
    plain = model(input_ids=ids, use_cache=False).logits[:, 16:]
    first = model(input_ids=ids[:, :16], use_cache=True)
    name = next(name for name in ("past_key_values", "cache_params", "state") if getattr(first, name, None) is not None)
    more = {name: first[name], "use_cache": True, **{name: more[name] for name in more if name in known}}
    then = model(input_ids=ids[:, 16:], **more).logits
print("largest difference / standard deviation:", ((then - plain).abs().max() / plain.std()).item())
