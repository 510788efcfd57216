"""The checked-in protocol code is what the compiler makes of the checked-in source."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from server.proto import SERVICE
from server.proto.generate import generate, proto_files
from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tpu_engine.request import FinishReason, SamplingParams

GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def test_generated_code_is_fresh(repo_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    stub = (repo_root / "server/proto/tpu_engine/v1/engine_pb2_grpc.py").read_text()
    made_with = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", stub)
    assert made_with is not None
    if made_with[1] != metadata.version("grpcio-tools"):
        pytest.skip(f"needs grpcio-tools {made_with[1]}, the version the code was made with")
    generate(tmp_path)
    for source in proto_files():
        for ending in GENERATED:
            path = source.with_name(source.stem + ending)
            assert (tmp_path / path).read_bytes() == (repo_root / path).read_bytes(), path


def test_names_on_the_wire_match_the_engines() -> None:
    assert pb.DESCRIPTOR.services_by_name["Engine"].full_name == SERVICE
    fields = set(pb.GenerateRequest.DESCRIPTOR.fields_by_name)
    assert set(SamplingParams.__dataclass_fields__) <= fields
    values = pb.FinishReason.DESCRIPTOR.values_by_name
    reasons = {name.removeprefix("FINISH_REASON_").lower() for name in values}
    assert reasons == {str(reason) for reason in FinishReason} | {"unspecified"}
