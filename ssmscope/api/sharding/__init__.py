"""Analyses over data sets in batches, which several processes or machines can measure."""
