"""Run `analyze` as `python -m ssmscope`."""

from ssmscope.cli import main

main()
