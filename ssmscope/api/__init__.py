"""Analyses as functions, commands and entries of plans: their options, inputs and results."""
