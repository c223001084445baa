"""The prompt read in chunks of 16 against one pass: python chunks.py MODEL"""

import torch
from small import network, texts, written

ids = texts(1)
print("largest difference / standard deviation:", written(network(), ids, torch.ones_like(ids), prefill_chunk_size=16))
