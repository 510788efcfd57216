"""Generates the Python code of every `.proto` file here: `python -m server.proto.generate`.

Owns the one command line of the protocol compiler. The generated files are checked in, so that
users need no compiler; a test generates them again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]


def proto_files() -> list[Path]:
    """Paths of the sources, relative to the repository's root."""
    folder = Path(__file__).resolve().parent
    return sorted(path.relative_to(ROOT) for path in folder.rglob("*.proto"))


def generate(destination: Path) -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` below `destination`.

    Raises `RuntimeError` where the compiler refuses a source (it prints why).
    """
    from grpc_tools import protoc  # pyright: ignore[reportMissingTypeStubs]

    arguments = [
        "protoc",
        f"--proto_path={ROOT}",
        f"--python_out={destination}",
        f"--pyi_out={destination}",
        f"--grpc_python_out={destination}",
        *(path.as_posix() for path in proto_files()),
    ]
    if cast("Any", protoc).main(arguments) != 0:
        raise RuntimeError("the protocol compiler refused a source")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
