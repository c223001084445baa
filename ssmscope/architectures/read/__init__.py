"""Layers of other libraries, one file per family."""
