"""What our own models consist of around their layers: backbones, language models and the classifier."""
