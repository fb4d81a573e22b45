"""`python -m headrace.cli`."""

from . import main

main()
