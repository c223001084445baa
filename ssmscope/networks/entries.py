"""What `ssmscope.networks` registers, as a package does by entry points."""

ENTRIES = {"ssmscope.models": {"ssm-classifier": "ssmscope.networks.classifier"}}
