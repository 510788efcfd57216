"""Namespace of the protocol package `tpu_engine.v1`; not the engine."""
