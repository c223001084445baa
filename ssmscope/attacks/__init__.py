"""Attacks on trained models: position, insertion, overflow, poisoning, prompts, words, and the effect of a change."""
