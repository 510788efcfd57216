"""Drivers of our own engine, offline and behind gRPC; each runs as a subprocess."""
