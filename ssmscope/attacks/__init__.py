"""Attacks on trained models: position, insertion, overflow, noise, poisoning, prompts, words, effects of changes."""
