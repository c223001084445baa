"""Probes of trained models: how stable they are, and what generalisation theory says of them."""
