"""Layers of other libraries, one file a family."""
