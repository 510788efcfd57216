"""The command line: help, configuration files, one-line errors, generate, chat, bench."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from server.cli import app, batch, bench, chat, demo, generate
from server.cli.flags import option_help, read_options
from server.cli.sampling import SamplingFlags
from server.cli.startup import StartupDisplay, with_cache
from server.load import Lengths, Sample, draw_jobs, percentiles, summarize
from server.options import ServerOptions
from tests.fake_runner import FakeRunner, expected_tokens
from tests.server_rig import CONFIG, byte_tokenizer, fake_engine, running_server
from tpu_engine import front_engine
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig
from tpu_engine.request import Request, SamplingParams

COMMANDS = ("serve", "generate", "chat", "batch", "bench", "demo")


def invoke(*words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(words), input=stdin, env={"COLUMNS": "200"})


@pytest.fixture(name="fake_build")
def _fake_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that build an engine get the fake one."""
    monkeypatch.setattr(front_engine, "build_real_engine", lambda *_: fake_engine())


def fake_text(prompt: str, max_tokens: int, seed: int = 0) -> str:
    """The fake model's answer to a text."""
    ids = tuple(byte_tokenizer().encode(prompt))
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return byte_tokenizer().decode(expected_tokens(Request(0, ids, params, 0.0)))


def test_help_is_complete_and_loads_no_jax_and_no_grpc() -> None:
    code = (
        "import sys\nfrom server.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'jax', 'grpc', 'tokenizers'} & set(sys.modules), 'heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in COMMANDS)


def test_version_is_that_of_the_installed_package() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.output) == (
        0,
        f"tpu-engine {metadata.version('tpu-engine')}\n",
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "--debug" in result.output


@pytest.mark.parametrize(
    "cls",
    [
        EngineConfig,
        ServerOptions,
        SamplingFlags,
        generate.GenerateFlags,
        chat.ChatFlags,
        batch.BatchFlags,
        bench.BenchFlags,
        demo.DemoFlags,
    ],
)
def test_every_flag_has_help(cls: Any) -> None:
    helps = option_help(cls)
    assert all(helps.get(field.name) for field in fields(cls)), helps


@pytest.mark.parametrize("command", COMMANDS)
def test_help_cuts_no_flag_in_a_small_terminal(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert "…" not in result.output


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    for name, text in (
        ("a.yaml", "model: from-file\nmax_num_seqs: 4\noverlap: false\ngrace_s: 5\n"),
        ("a.toml", 'model = "from-file"\nmax_num_seqs = 4\noverlap = false\ngrace_s = 5\n'),
    ):
        path = tmp_path / name
        path.write_text(text)
        given = {"max_num_seqs": 8, "port": 0, "dtype": None}
        engine, server = read_options((EngineConfig, ServerOptions), given, path)
        assert engine == EngineConfig("from-file", max_num_seqs=8, overlap=False)
        assert server == ServerOptions(port=0, grace_s=5.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x", "option modle must be a known option (nearest: model), got 'x'"),
        ("model: 3", "option model must be of type str, got 3"),
        ("model: x\nmax_num_seqs: '4'", "option max_num_seqs must be of type int, got '4'"),
        ("model: x\nmax_num_seqs: true", "option max_num_seqs must be of type int, got True"),
        ("model: x\nmax_num_seqs: 0", "option max_num_seqs must be at least 1, got 0"),
        ("model: x\npage_size: 17", "option page_size must be one of 8"),
        ("model: [", "valid YAML or TOML"),
        ("model: 2024-13-45", "valid YAML or TOML"),
        ("model: x\nmax_model_len: 1", "option max_model_len must be at least 2"),
        ("- model", "a table of options"),
        ("port: 1", "option model must be given: use --model or a --config file"),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_code_1(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    result = invoke("serve", "--config", str(path))
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_errors_are_one_line_and_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(front_engine, "build_real_engine", broken)
    words = ("generate", "--model", "x", "--prompt", "y")
    result = invoke(*words)
    assert result.exit_code == 1
    assert result.stderr == "error: internal error, ZeroDivisionError: oh (--debug shows where)\n"
    assert "Traceback" in invoke(*words, "--debug").stderr
    missing = invoke("generate", "--config", "/nonexistent.yaml")
    assert missing.exit_code == 1
    assert "/nonexistent.yaml (No such file" in missing.stderr
    assert invoke("serve", "--model", "x", "--host", "0.0.0.0").exit_code == 1
    assert invoke("serve", "--no-such-flag").exit_code == 2


@pytest.mark.usefixtures("fake_build")
def test_generate_streams_the_answer_and_says_how_it_ended() -> None:
    words = ("generate", "--model", "fake", "--max-tokens", "12", "--seed", "0", "--ignore-eos")
    result = invoke(*words, "--prompt", "hello")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == fake_text("hello", 12) + "\n"
    assert "length; 5 prompt + 12 output tokens" in result.stderr
    assert invoke(*words, "--no-stats", stdin="hello").stdout == result.stdout
    refused = invoke("generate", "--model", "fake", "--prompt", "x", "--temperature", "-1")
    assert refused.exit_code == 1
    assert "temperature must be" in refused.stderr


@pytest.mark.usefixtures("fake_build")
def test_chat_keeps_the_conversation() -> None:
    words = ("chat", "--model", "fake", "--system", "be", "--max-tokens", "5", "--seed", "0")
    result = invoke(*words, "--ignore-eos", stdin="hi\n\nmore\n")
    assert result.exit_code == 0, result.stderr
    first = fake_text("<system>be<user>hi<assistant>", 5)
    second = fake_text(f"<system>be<user>hi<assistant>{first}<user>more<assistant>", 5)
    assert result.stdout == f"{first}\n{second}\n\n"


@pytest.mark.usefixtures("fake_build")
def test_ctrl_c_in_the_middle_of_a_step_ends_the_answer_and_not_the_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ("chat", "--model", "fake", "--max-tokens", "20", "--seed", "0", "--ignore-eos")
    whole = invoke(*words, stdin="one\n").output.removesuffix("\n\n")
    collect, num_steps = FakeRunner.collect, itertools.count()

    def interrupted(self: FakeRunner, step: Any) -> Any:
        if next(num_steps) == 5:
            signal.raise_signal(signal.SIGINT)
        return collect(self, step)

    monkeypatch.setattr(FakeRunner, "collect", interrupted)
    result = invoke(*words, stdin="one\ntwo\n")
    assert result.exit_code == 0, result.output
    first, stopped, second = result.output.partition(" [stopped]\n")
    assert stopped
    assert whole.startswith(first)
    assert len(second) > len(first)


def test_chat_wants_either_a_server_or_a_model() -> None:
    for words in ((), ("--server", "x:1", "--model", "y"), ("--server", "x:1", "--dtype", "auto")):
        result = invoke("chat", *words)
        assert result.exit_code == 1
        assert "option" in result.stderr


@pytest.fixture(name="address")
def _address() -> Iterator[str]:
    """A fake server that runs in a thread of its own."""
    started, stop = threading.Event(), threading.Event()
    found: list[str] = []

    async def run() -> None:
        async with running_server(CONFIG) as rig:
            found.append(rig.address)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(20)
    yield found[0]
    stop.set()
    thread.join()


def test_chat_talks_to_a_server(address: str) -> None:
    words = ("chat", "--server", address, "--max-tokens", "5", "--seed", "0", "--ignore-eos")
    result = invoke(*words, stdin="hi\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == fake_text("<user>hi<assistant>", 5) + "\n\n"
    refused = invoke("chat", "--server", address, "--max-tokens", "0", stdin="hi\n")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: INVALID_ARGUMENT: max_tokens must be")


@pytest.mark.parametrize("load", [("--concurrency", "4"), ("--rate", "200")])
def test_bench_measures_and_writes_json(address: str, tmp_path: Path, load: Any) -> None:
    path = tmp_path / "result.json"
    words = ("bench", "--server", address, "--num-requests", "12", "--prompt-len", "3-20")
    result = invoke(*words, "--output-len", "8", *load, "--json", str(path))
    assert result.exit_code == 0, result.stderr
    assert "TTFT (ms)" in result.stdout
    assert "P99" in result.stdout
    found = json.loads(path.read_text())
    assert (found["num_requests"], found["num_failed"]) == (12, 0)
    assert found["num_output_tokens"] == 96
    assert found["server"]["compile_count"] == 0
    assert found["server"]["steps"] > 0
    assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p99"] <= found["e2e_s"]["p99"]
    assert found["output_tok_s"] == pytest.approx(96 / found["duration_s"])


def test_bench_fails_before_the_run_where_it_can_not_write(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "result.json"
    result = invoke("bench", "--server", "127.0.0.1:1", "--json", str(path))
    assert result.exit_code == 1
    assert result.stderr == f"error: {path}: No such file or directory\n"
    both = invoke("bench", "--rate", "1", "--concurrency", "1")
    assert "option rate must be absent" in both.stderr
    nobody = invoke("bench", "--server", "127.0.0.1:1")
    assert nobody.exit_code == 1
    assert nobody.stderr.startswith("error: UNAVAILABLE")


def test_load_is_reproducible_and_its_summary_exact() -> None:
    lengths = Lengths.parse("prompt_len", "3-9")
    jobs = draw_jobs(50, lengths, Lengths.parse("x", "4"), 100, 10.0, seed=1)
    assert jobs == draw_jobs(50, lengths, Lengths.parse("x", "4"), 100, 10.0, seed=1)
    assert {len(job.prompt_ids) for job in jobs} == set(range(3, 10))
    assert 2 < jobs[-1].arrival_s < 10
    for text in ("0", "9-3", "a", "3-", "-3", "1.5"):
        with pytest.raises(InvalidConfig, match="prompt_len"):
            Lengths.parse("prompt_len", text)
    samples = [Sample(0.0, 4.0, 1.0, [0.5, 0.7], 10, 3), Sample(1.0, 3.0, error="INTERNAL")]
    summary = summarize(samples)
    assert summary["num_failed"] == 1
    assert summary["errors"] == {"INTERNAL": 1}
    assert summary["output_tok_s"] == 0.75
    assert summary["total_tok_s"] == 3.25
    assert summary["ttft_s"] == {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert percentiles([]) == {}
    assert percentiles(list(range(101)))["p90"] == 90


def test_commands_keep_compiled_programs_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = StartupDisplay()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert with_cache(EngineConfig("m"), display).compile_cache == str(tmp_path / "tpu_engine")
    for chosen in ("", "elsewhere"):
        config = EngineConfig("m", compile_cache=chosen)
        assert with_cache(config, display) == config


def test_a_cache_that_can_not_be_written_is_said_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert with_cache(EngineConfig("m"), StartupDisplay()).compile_cache is None
    assert "can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("max-tokens", "99999999999999999999"),
        ("temperature", "nan"),
        ("top-p", "2"),
        ("min-p", "inf"),
        ("top-k", "-1"),
        ("seed", "4294967296"),
    ],
)
def test_wrong_sampling_flags_are_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, flag: str, value: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the engine was built")

    monkeypatch.setattr(front_engine, "build_real_engine", never)
    for words in (
        ("generate", "--model", "fake", "--prompt", "x"),
        ("chat", "--server", "[::1]:1"),
    ):
        result = invoke(*words, f"--{flag}", value, stdin="hi\n")
        assert result.exit_code == 1
        assert result.stderr.startswith(f"error: {flag.replace('-', '_')} must be ")
