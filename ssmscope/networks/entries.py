"""Entries of `ssmscope.networks`, of the form of a package's entry points."""

ENTRIES = {"ssmscope.models": {"ssm-classifier": "ssmscope.networks.classifier"}}
