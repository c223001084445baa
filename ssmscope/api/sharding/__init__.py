"""Analyses over data sets, cut into batches that several processes or machines measure."""
