"""Cached steps against one pass of the same text: python cached_steps.py MODEL [TEXTS]"""

import sys

import torch
from small import network, texts, written

ids = texts(int([*sys.argv, 1][2]))
print("largest difference / standard deviation:", written(network(), ids, torch.ones_like(ids)))
