"""Headrace beside its peers, on one machine and in one run: `python -m bench`."""
