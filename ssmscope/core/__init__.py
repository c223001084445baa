"""What all analyses stand on: models, traces of their layers, and what can be done to them in a run."""
