"""The wire format: `.proto` files and the code generated from them (`generate.py`)."""

SERVICE = "tpu_engine.v1.Engine"
