"""State-space layers, one file per family: what the layer computes and, where transformers lacks them, its models.

A module here is an adapter, see `core.mixers.LayerAdapter`, and is imported with its family's first model; `entries`
lists them. In every one `compute_terms(mixer, u, mask, state)` takes the layer's input `u` (batch, length, width), a
`mask` (batch, length) that is True at real positions, and the `state` from which a run continues. At padding nothing is
written and the state holds.
"""
