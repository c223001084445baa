"""What is patched and what is shown of it, as the views call them."""

SITES = {
    "state": "states behind a token",
    "output": "mixers' outputs",
    "residual": "the residual stream before a block",
    "convolution": "what convolutions read",
    "head": "heads' outputs",
}
METRICS = {
    "normalised": "share of the way to the other run",
    "difference": "difference of logits",
    "probability": "probability of the answer",
}
