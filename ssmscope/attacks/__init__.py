"""Attacks on trained models, and what they cost them."""
