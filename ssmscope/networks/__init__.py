"""Parts of our own models around their layers: backbones, language models and the classifier."""
