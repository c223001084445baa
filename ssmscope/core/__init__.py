"""Models, traces of their layers, and edits of their runs: the base of all analyses."""
