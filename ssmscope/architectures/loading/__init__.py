"""Models from directories, hubs and memory."""
