"""Batch reports: a plan of models and analyses, the jobs that it asks for, and the page that they end in."""
