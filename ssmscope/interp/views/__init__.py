"""How tokens with scores are shown: in a terminal, on a page, in a figure."""
