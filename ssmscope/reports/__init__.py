"""Batch reports: a plan of models and analyses, its jobs, and the page of their results; and the live page."""
