"""Attacks on trained models: position, insertion, overflow, typing errors, poisoning, prompts, words, effects of changes."""
