"""What a driver says on its standard output: one JSON object per line.

Owns the two kinds of line, which drivers of peers write on their own.
"""

from __future__ import annotations

import json


def ready(**facts: object) -> None:
    """The engine can serve now."""
    print(json.dumps({"event": "ready", **facts}), flush=True)


def value(name: str, number: float) -> None:
    """One measurement."""
    print(json.dumps({"event": "value", "name": name, "value": number}), flush=True)
