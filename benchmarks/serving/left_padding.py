"""A left-padded prompt against the prompt alone: python left_padding.py MODEL [TEXTS]"""

import contextlib
import sys

import torch
from small import network, texts, written

model, ids = network(), texts(1)
x, mask = torch.nn.functional.pad(ids, (7, 0), value=3), torch.nn.functional.pad(torch.ones_like(ids), (7, 0))
if sys.argv[2:]:  # A longer text beside it.
    x, mask = torch.cat([x, x.flip(1)]), torch.cat([mask, torch.ones_like(mask)])
with torch.no_grad():
    plain = model(input_ids=ids, use_cache=False).logits
    padded = network()(input_ids=x, attention_mask=mask, use_cache=False).logits[:1, 7:]
most = ((padded - plain).abs().max() / plain.std()).item()
with contextlib.suppress(TypeError, ValueError):  # Without cached steps.
    most = max(most, written(network(), x, mask, skip=7))
print("largest difference / standard deviation:", most)
