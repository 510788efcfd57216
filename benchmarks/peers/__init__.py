"""Drivers of other engines: each runs in a venv of its own, as a subprocess."""
