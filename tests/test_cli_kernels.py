"""`tpu-engine kernels`: the report's contract, comparison, page, reading a dump, tuning."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kernels.analysis.dump import kernel_files
from kernels.analysis.prediction import WorkFacts
from kernels.analysis.schedule import KernelSchedule, read_schedule
from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.pallas import blocks as choice
from kernels.attention.pallas import chunk_blocks, decode_blocks
from kernels.chips import CHIPS
from server.cli import app
from server.cli.flags import option_help
from server.cli.kernel_lab import launch, rows, tuning
from server.cli.kernel_lab.cases import KernelCase, default_cases
from server.cli.kernel_lab.compare import changes, identity, read_report
from server.cli.kernel_lab.compiling import geometry_of
from server.cli.kernel_lab.launch import Compiled, CompileFailed, Job, compiler_environment
from server.cli.kernels import COMMITTED, ReportFlags, TuneFlags

DUMP = Path(__file__).parent / "fixtures" / "kernel_dumps" / "tiny-v6e-jax0.12"

KEYS = (
    *("kernel", "chip", "n_q", "n_kv", "head_dim", "page", "kv_dtype", "phase"),
    *("cycles_per_kv_token_head", "hbm_cycles", "roofline_share", "useful_flop_share"),
    *("vmem_bytes", "code_bytes", "compile_s", "prologue_us"),
)


def invoke(*words: str, columns: str = "200") -> Result:
    return CliRunner().invoke(app, ["kernels", *words], env={"COLUMNS": columns})


@cache
def committed() -> KernelSchedule:
    (files,) = kernel_files(DUMP)
    return read_schedule(files)


def compiled(job: Job) -> Compiled:
    """As if the job's kernel were that of the committed dump."""
    step = {"items": 2, "blocks": 3, "masked_blocks": 4, "useful_flops": 10**9, "hbm_bytes": 10**6}
    said: dict[str, Any] = {
        "lower_s": 0.5,
        "compile_s": 1.5,
        "blocks": dict(job.blocks or {"block_tokens": 128}),
        "geometry": {
            "num_q_heads": job.case.n_q,
            "num_kv_heads": job.case.n_kv,
            "key_width": 128,
            "value_width": 128,
            "page_size": job.case.page,
        },
        "vmem_estimate": 240_000,
        "smem_estimate": 512,
        "steps": {} if job.case.phase == "decode" else {"0": step, "4096": step},
        "jax": "0.12",
        "libtpu": "0.0.50",
    }
    facts = WorkFacts(128, 1, 1, 512, 16 * 128 * 128 * 4)
    return Compiled(job, committed(), facts, said)


@pytest.fixture(name="no_compiler")
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands compile nothing: every case gets the committed dump."""
    monkeypatch.setattr(launch, "require_compiler", lambda: None)
    monkeypatch.setattr(launch, "compile_one", lambda job, keep: compiled(job))


# --- help and refusals ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["report", "read", "tune"])
def test_help_cuts_nothing_in_a_small_terminal(command: str) -> None:
    result = invoke(command, "--help", columns="80")
    assert result.exit_code == 0
    assert "…" not in result.output


@pytest.mark.parametrize("cls", [ReportFlags, TuneFlags])
def test_every_flag_has_help(cls: Any) -> None:
    assert set(option_help(cls)) == set(cls.__dataclass_fields__)


def test_a_missing_compiler_is_said_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = invoke("report", "--chip", "v6e")
    assert result.exit_code == 1
    assert "pip install 'tpu-engine[tpu]'" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--chip", "v7e"), "option chip must be one of v4, v5e, v5p, v6e, tpu7x, got 'v7e'"),
        (("--kernel", "x"), "option kernel must be one of decode_attention, chunk_attention"),
        (("--jobs", "3"), "option jobs must be from 1 to 2, got 3"),
        (("--match", "page 17"), "option match must be part of a case's name, got 'page 17'"),
        (("--baseline", "/none"), "option baseline must be a readable file"),
    ],
)
@pytest.mark.usefixtures("no_compiler")
def test_wrong_flags_are_refused_by_name(words: tuple[str, ...], message: str) -> None:
    result = invoke("report", *words)
    assert result.exit_code == 1
    assert message in result.stderr


# --- report --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_compiler")
def test_the_json_file_keeps_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = invoke("report", "--chip", "v6e", "--chip", "tpu7x", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "nothing was executed" in " ".join(result.stdout.split())
    found = json.loads(path.read_text())
    assert [row["chip"] for row in found] == sorted((row["chip"] for row in found), reverse=True)
    for row in found:
        assert set(KEYS) <= row.keys()
        assert row["chip"] in CHIPS
        assert row["phase"] in ("decode", "mixed")
        assert all(context.isdecimal() for context in row["roofline_share"])
        assert all(0 < share <= 1 for share in row["roofline_share"].values())
    decode = next(row for row in found if row["chip"] == "v6e" and row["phase"] == "decode")
    assert decode["cycles_per_kv_token_head"] == pytest.approx(103 / 128, rel=1e-3)
    assert decode["scheduled_cycles_per_kv_token_head"] == pytest.approx(766 / 128, rel=1e-3)
    assert decode["spills"] == 0
    assert decode["vmem_bytes"] > 131072


def test_the_committed_report_can_be_compared_with() -> None:
    found = read_report(Path(__file__).parent.parent / COMMITTED)
    assert len({identity(row) for row in found}) == len(found) > 0
    for row in found:
        assert set(KEYS) <= row.keys()


AIMS = [
    *(
        (chip, 32, 8, 128, page, "bfloat16", "decode")
        for chip in ("v6e", "tpu7x")
        for page in (16, 128)
    ),
    *(
        (chip, 8, 2, 128, page, "bfloat16", "decode")
        for chip in ("v6e", "tpu7x")
        for page in (16, 128)
    ),
    *((chip, 16, 8, 256, 128, "bfloat16", "decode") for chip in ("v6e", "tpu7x")),
    *((chip, 4, 1, 256, 128, "bfloat16", "decode") for chip in ("v6e", "tpu7x")),
    *((chip, 32, 8, 128, 64, "float8_e4m3fn", "decode") for chip in ("v6e", "tpu7x")),
    ("v5e", 32, 8, 128, 64, "int8", "decode"),
    *((chip, 32, 8, 128, 128, "bfloat16", "mixed") for chip in ("v5e", "v6e", "tpu7x")),
]


@pytest.mark.parametrize("aim", AIMS)
def test_every_aim_is_among_the_default_cases(aim: tuple[Any, ...]) -> None:
    chip, *rest = aim
    cases = [
        [case.n_q, case.n_kv, case.head_dim, case.page, case.kv_dtype, case.phase]
        for case in default_cases(chip)
    ]
    assert rest in cases


def test_labels_of_default_cases_are_unique() -> None:
    labels = [case.label for case in default_cases("v6e")]
    assert len(labels) == len(set(labels))


@pytest.mark.usefixtures("no_compiler")
def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert invoke("report", "--chip", "v6e", "--html", str(path)).exit_code == 0
    page = path.read_text()
    assert page.count("<svg") == 2
    assert page.count("<circle") > 10
    assert "nothing was executed" in page
    for forbidden in ("<script", "http:", "https:", "src=", "@import", "url("):
        assert forbidden not in page


@pytest.mark.usefixtures("no_compiler")
def test_a_failed_compile_is_named_and_the_rest_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compile_one(job: Job, keep: Path | None) -> Compiled:
        if job.case.kv_dtype == "int8":
            raise CompileFailed(f"{job.label}: no")
        return compiled(job)

    monkeypatch.setattr(launch, "compile_one", compile_one)
    path = tmp_path / "report.json"
    result = invoke("report", "--chip", "v6e", "--json", str(path))
    assert result.exit_code == 1
    assert "error: v6e decode 32/8/128 page 64 int8: no" in result.stderr
    assert len(json.loads(path.read_text())) == len(default_cases("v6e")) - 1


# --- comparison ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_compiler")
def test_a_regression_is_named_and_can_fail(tmp_path: Path) -> None:
    path, words = tmp_path / "old.json", ("report", "--chip", "v6e", "--kernel", "decode_attention")
    assert invoke(*words, "--json", str(path)).exit_code == 0
    old = json.loads(path.read_text())
    assert "no figure differs" in invoke(*words, "--baseline", str(path)).stdout
    old[0]["cycles_per_kv_token_head"] *= 0.9
    path.write_text(json.dumps(old))
    result = invoke(*words, "--baseline", str(path), "--fail-on-regression", "5")
    assert result.exit_code == 1
    name = "v6e decode 32/8/128 page 128 bfloat16: cycles_per_kv_token_head"
    assert name in result.stdout
    assert "11.1 % worse" in result.stdout
    assert invoke(*words, "--baseline", str(path), "--fail-on-regression", "15").exit_code == 0
    assert invoke(*words, "--baseline", str(path)).exit_code == 0


def test_changes_know_which_direction_is_better() -> None:
    old = rows.row_of(compiled(Job(default_cases("v6e")[0], "v6e")))
    new = json.loads(json.dumps(old))
    new["roofline_share"]["256"] = old["roofline_share"]["256"] / 2
    new["code_bytes"] = old["code_bytes"] // 2
    worse, better = sorted(changes([new], [old]), key=lambda change: -change.worse_by)
    assert (worse.figure, round(worse.worse_by)) == ("roofline_share at 256", 50)
    assert (better.figure, better.worse_by < 0) == ("code_bytes", True)
    assert list(changes([new | {"page": 1}], [old])) == []


# --- the compiler's process ----------------------------------------------------------------------


def test_the_compiler_sees_no_device_and_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--mine=1")
    environment = compiler_environment(Path("/dump"))
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    flags = environment["LIBTPU_INIT_ARGS"].split()
    assert flags[:2] == ["--mine=1", "--xla_jf_dump_to=/dump"]
    assert "packed-bundles-post-ra" in flags[-1]


def test_a_crashed_compiler_says_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho noise >&2\necho 'ValueError: too large' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(CompileFailed, match=r"^v6e decode .*: ValueError: too large$"):
        launch.compile_one(Job(default_cases("v6e")[0], "v6e"))


@pytest.mark.tpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernel", ["decode_attention", "chunk_attention"])
def test_a_kernel_is_compiled_and_read(kernel: str) -> None:
    pytest.importorskip("libtpu", reason="needs the TPU compiler (make venv-tpu)")
    case = KernelCase(kernel, 8, 2, 128, 128, num_tokens=256, num_seqs=16)
    row = rows.row_of(launch.compile_one(Job(case, "v6e")))
    assert 0 < row["cycles_per_kv_token_head"] <= row["all_in_cycles_per_kv_token_head"]
    assert row["scheduled_cycles_per_kv_token_head"] >= row["cycles_per_kv_token_head"]
    assert 0 < row["useful_flop_share"] < 1
    assert row["prologue_us"] < 5
    # The kernel's own estimate holds all buffers; the compiler adds its scratch and spills.
    assert row["vmem_estimate_bytes"] <= row["vmem_bytes"] <= row["vmem_estimate_bytes"] + 2**20


# --- reading -------------------------------------------------------------------------------------


def test_any_dump_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "read.json"
    result = invoke("read", str(DUMP), "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "tiny_attention.1: 157 bundles, v6e" in result.stdout
    assert "0.0 *" in result.stdout
    (schedule,) = json.loads(path.read_text())
    assert schedule["loops"][1]["scheduled"] == 913


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    result = invoke("read", str(tmp_path))
    assert result.exit_code == 1
    assert "must be a folder with final bundles of a Pallas kernel" in result.stderr


# --- blocks --------------------------------------------------------------------------------------

GEOMETRY = Geometry(32, 8, 128, 128, 128)
SCORING = Scoring(scale=128**-0.5)


def test_every_tuned_entry_is_loaded_and_fits() -> None:
    for kernel, chip, geometry, blocks in choice.entries(choice.table_text()):
        scoring = Scoring(scale=geometry.key_width**-0.5)
        assert choice.tuned_blocks(kernel, geometry, chip) == blocks
        if kernel == "decode_attention":
            found = choice.decode_blocks_for(geometry, scoring, CHIPS[chip])
            assert found == decode_blocks.DecodeBlocks(**blocks)
            decode_blocks.check_blocks(geometry, scoring, found, CHIPS[chip])
        else:
            assert kernel == "chunk_attention"
            chunk = choice.chunk_blocks_for(geometry, scoring, CHIPS[chip])
            assert chunk == chunk_blocks.ChunkBlocks(**blocks)
            chunk_blocks.check_blocks(geometry, scoring, chunk, CHIPS[chip])


def test_explicit_blocks_win_over_tuned_and_tuned_over_the_kernels_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chip = CHIPS["v6e"]
    own, tuned, explicit = decode_blocks.candidate_blocks(GEOMETRY, SCORING, chip)[:3]
    table = {("decode_attention", "v6e", GEOMETRY): vars_of(tuned)}
    monkeypatch.setattr(choice, "_table", lambda: table)
    assert choice.decode_blocks_for(GEOMETRY, SCORING, chip) == tuned
    assert choice.decode_blocks_for(GEOMETRY, SCORING, chip, explicit=explicit) == explicit
    assert choice.decode_blocks_for(GEOMETRY, SCORING, CHIPS["v5e"]) != tuned
    monkeypatch.setattr(choice, "_table", dict)
    assert choice.decode_blocks_for(GEOMETRY, SCORING, chip) == own
    huge = replace(own, num_slots=1 << 12)
    with pytest.raises(ValueError, match="VMEM"):
        choice.decode_blocks_for(GEOMETRY, SCORING, chip, explicit=huge)


def vars_of(blocks: decode_blocks.DecodeBlocks) -> dict[str, int]:
    return {name: getattr(blocks, name) for name in blocks.__dataclass_fields__}


def test_candidates_begin_with_the_kernels_own_choice() -> None:
    cases = default_cases("v6e")
    jobs = list(tuning.candidate_jobs(cases, "v6e", 3))
    geometry, _ = geometry_of(cases[0])
    own = decode_blocks.default_blocks(geometry, SCORING, CHIPS["v6e"])
    assert jobs[0].blocks == vars_of(own)
    of_first = [job for job in jobs if job.case == cases[0]]
    assert len(of_first) == len({str(job.blocks) for job in of_first}) == 3


@pytest.mark.usefixtures("no_compiler")
def test_tuning_keeps_only_what_is_worthwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = choice.entry("decode_attention", "v4", GEOMETRY, {"block_tokens": 64})
    path = tmp_path / "table.json"
    path.write_text(json.dumps([other]))
    words = ("tune", "--chip", "v6e", "--kernel", "decode_attention", "--table", str(path))
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text()) == [other]  # all candidates scored alike

    jobs = list(tuning.candidate_jobs(default_cases("v6e", ["decode_attention"]), "v6e", 6))
    favourite = jobs[3]

    def score(row: rows.Row) -> float:
        is_same = row["page"] == favourite.case.page and row["n_q"] == favourite.case.n_q
        return 2.0 if is_same and row["blocks"] == favourite.blocks else 1.0

    monkeypatch.setattr(tuning, "score", score)
    assert invoke(*words).exit_code == 0
    found, kept = sorted(json.loads(path.read_text()), key=lambda entry: entry["chip"] == "v4")
    assert kept == other
    assert (found["geometry"]["page_size"], found["blocks"]) == (128, favourite.blocks)
