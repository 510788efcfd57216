"""`tpu-engine batch`: order, errors per line, and runs that were killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from server.batch_file import OutputFile, parse_line
from server.cli import app
from tests.server_rig import fake_engine
from tpu_engine import front_engine
from tpu_engine.errors import InvalidConfig, InvalidRequest


@pytest.fixture(autouse=True)
def _fake_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_engine, "build_real_engine", lambda *_: fake_engine())


def write_input(path: Path, num: int = 40) -> None:
    """Requests of mixed lengths; every tenth line is wrong in some way."""
    lines: list[bytes] = []
    for index in range(num):
        entry = {"id": f"r{index}", "text": f"prompt {index}", "max_tokens": 1 + index * 7 % 23}
        lines.append(json.dumps({**entry, "seed": index, "ignore_eos": True}).encode())
    lines[3] = b"{not json"
    lines[13] = b'{"text": "x", "max_token": 5}'
    lines[23] = b'{"id": 23, "text": "x", "max_tokens": 0}'
    lines[33] = b'"\xff"'
    path.write_bytes(b"\n".join(lines) + b"\n")


def run(tmp_path: Path, *words: str) -> Result:
    names = ("--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))
    return CliRunner().invoke(app, ["batch", "--model", "fake", *names, *words])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_in_input_order_with_errors_per_line(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl")
    result = run(tmp_path)
    assert result.exit_code == 0, result.stderr
    found = records(tmp_path / "out.jsonl")
    assert [record["index"] for record in found] == list(range(40))
    for index, record in enumerate(found):
        if index % 10 == 3:
            assert record["error"]["message"]
            continue
        assert record["id"] == f"r{index}"
        assert len(record["token_ids"]) == record["num_output_tokens"] == 1 + index * 7 % 23
        assert record["finish_reason"] == "length"
        assert record["seed"] == index
    assert found[3]["error"]["field"] == "line"
    assert found[13]["error"]["limit"] == "a known key (nearest: max_tokens)"
    assert (found[23]["id"], found[23]["error"]["field"]) == (23, "max_tokens")
    assert "40 lines, 40 of them now" in result.stderr


@pytest.mark.parametrize("torn", [0, 1, 25, -1])
def test_a_torn_output_is_continued_without_a_lost_or_doubled_line(
    tmp_path: Path, torn: int
) -> None:
    write_input(tmp_path / "in.jsonl")
    assert run(tmp_path).exit_code == 0
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    cut = b"".join(lines[:17]) + lines[17][:torn]
    path.write_bytes(cut)
    result = run(tmp_path)
    assert result.exit_code == 0, result.stderr
    assert path.read_bytes() == whole
    assert "23 of them now" in result.stderr
    assert "0 of them now" in run(tmp_path).stderr
    assert path.read_bytes() == whole


def test_an_output_of_another_run_is_not_touched(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl")
    assert run(tmp_path).exit_code == 0
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    text = (tmp_path / "in.jsonl").read_text(errors="surrogateescape")
    changed = text.replace("prompt 5", "prompt five")
    (tmp_path / "in.jsonl").write_text(changed, errors="surrogateescape")
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "out.jsonl, line 6" in result.stderr
    assert path.read_bytes() == whole
    (tmp_path / "in.jsonl").write_text(text, errors="surrogateescape")
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        locked = run(tmp_path)
    assert locked.exit_code == 1
    assert "no other batch run" in locked.stderr


CHILD = """
import sys
from server.cli import app
from tests.server_rig import fake_engine
from tpu_engine import front_engine
front_engine.build_real_engine = lambda *_: fake_engine(step_s=0.003)
app(sys.argv[1:])
"""


def test_a_run_that_is_killed_at_any_time_can_be_continued(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 60)
    out = tmp_path / "out.jsonl"
    names = ("--input", str(tmp_path / "in.jsonl"), "--output", str(out))
    words = (sys.executable, "-c", CHILD, "batch", "--model", "fake", *names)
    for goal in (5, 30):
        child = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + 60
        while not out.exists() or out.read_bytes().count(b"\n") < goal:
            assert time.monotonic() < end_s
            assert child.poll() is None
            time.sleep(0.002)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert run(tmp_path).exit_code == 0
    interrupted = records(out)
    out.unlink()
    assert run(tmp_path).exit_code == 0
    assert interrupted == records(out)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("[]", "line"),
        ("", "line"),
        ("[" * 100_000, "line"),
        ("{}", "prompt"),
        ('{"text": "a", "token_ids": [1]}', "prompt"),
        ('{"text": 3}', "text"),
        ('{"token_ids": [1, "2"]}', "token_ids[1]"),
        ('{"token_ids": [true]}', "token_ids[0]"),
        ('{"messages": [{"role": "user"}]}', "messages[0]"),
        ('{"messages": [{"role": "user", "content": 1}]}', "messages[0].content"),
        ('{"text": "a", "max_tokens": 1.5}', "max_tokens"),
        ('{"text": "a", "temperature": "hot"}', "temperature"),
        ('{"text": "a", "stop": "x"}', "stop"),
        ('{"text": "a", "stop": [1]}', "stop[0]"),
        ('{"text": "a", "ignore_eos": 1}', "ignore_eos"),
    ],
)
def test_a_wrong_line_names_its_key(line: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_line(line.encode())
    assert caught.value.field == field


def test_absent_and_null_are_the_same() -> None:
    assert parse_line(b'{"text": "a", "seed": null}') == parse_line(b'{"text": "a"}')


def test_answers_wait_for_those_before_them(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\nb\nc\n")
    with OutputFile(tmp_path / "out", tmp_path / "in", "m") as output:
        output.put(2, {})
        output.put(1, {})
        assert (tmp_path / "out").read_bytes() == b""
        output.put(0, {})
        assert output.num_done == 3
        assert [record["index"] for record in records(tmp_path / "out")] == [0, 1, 2]
    with pytest.raises(InvalidConfig, match="line 1"):
        OutputFile(tmp_path / "out", tmp_path / "in", "m")


@pytest.mark.parametrize("content", [b'{"text": "precious"}', b"notes without an end", b"{"])
def test_a_file_that_no_run_wrote_is_never_cut_off(tmp_path: Path, content: bytes) -> None:
    write_input(tmp_path / "in.jsonl", 40)
    out = tmp_path / "out.jsonl"
    out.write_bytes(content)
    result = run(tmp_path)
    if content == b"{":  # may be the first byte of a run's own line
        assert result.exit_code == 0
        return
    assert result.exit_code == 1
    assert "option output must be" in result.stderr
    assert out.read_bytes() == content


def test_input_and_output_in_one_file_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "the only line, without an end"}')
    before = path.read_bytes()
    words = ("batch", "--model", "fake", "--input", str(path), "--output", str(path))
    assert CliRunner().invoke(app, words).exit_code == 1
    assert path.read_bytes() == before
