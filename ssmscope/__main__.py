"""`python -m ssmscope` is `analyze`."""

from ssmscope.cli import main

main()
