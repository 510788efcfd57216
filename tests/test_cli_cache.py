"""`tpu-engine cache`: what an operator sees of a folder of compiled programs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from buckets.cache_key import CacheKey
from buckets.cache_store import CacheStore
from buckets.plan import Plan
from buckets.plan_file import plan_to_yaml
from buckets.shape import StepShape
from server.cli import app

DAY_S = 86400
SHAPES = [StepShape(n, 1, 4, 1) for n in (8, 16, 32)]


def key(shape: StepShape) -> CacheKey:
    program = f"program of {shape.num_tokens}"
    return CacheKey(program, str(shape), "cpu x 1", "tensor=1", "{}", "jax 0.10.2", "", "avx")


DIGESTS = [key(shape).digest() for shape in SHAPES]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three programs of 1,000 bytes; the first was used three days ago, the last one just now."""
    path = tmp_path / "cache"
    store = CacheStore(path)
    for age, shape in zip((3, 2, 0), SHAPES, strict=True):
        assert store.write(key(shape), b"x" * 1000, {"compile_s": 2.5}) == ""
        recipe = f"{shape.num_tokens:064d}"
        assert store.put_record("recipe", recipe, {"program": key(shape).program}) == ""
        used_s = time.time() - age * DAY_S
        os.utime(entry(path, key(shape).digest()), (used_s, used_s))
    return path


def entry(folder: Path, digest: str) -> Path:
    return folder / "entries" / f"{digest}.executable"


def invoke(command: str, *words: str | Path, folder: Path) -> Result:
    given = ["cache", command, *map(str, words), "--cache", str(folder)]
    return CliRunner().invoke(app, given, env={"COLUMNS": "300"})


def stored(folder: Path) -> set[int]:
    """Tokens of the shapes that are left."""
    digests = CacheStore(folder).digests()
    return {s.num_tokens for s in SHAPES if key(s).digest() in digests}


def test_ls_shows_every_program(folder: Path) -> None:
    result = invoke("ls", folder=folder)
    assert result.exit_code == 0, result.output
    for shape, digest in zip(SHAPES, DIGESTS, strict=True):
        (line,) = (line for line in result.stdout.splitlines() if digest[:12] in line)
        assert all(word in line for word in (str(shape), "cpu x 1", "jax 0.10.2", "2.5", "no"))
    assert "3 programs" in result.stdout


def test_ls_gives_json(folder: Path) -> None:
    rows = json.loads(invoke("ls", "--json", folder=folder).stdout)
    assert [row["digest"] for row in rows] == DIGESTS
    assert rows[0]["num_bytes"] == 1000
    assert rows[0]["facts"] == {"compile_s": 2.5}
    assert rows[0]["last_use_s"] == pytest.approx(time.time() - 3 * DAY_S, abs=60)


def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path: Path) -> None:
    result = invoke("ls", folder=tmp_path / "none")
    assert result.exit_code == 1
    assert "cache must be a folder that is there" in result.stderr
    assert not (tmp_path / "none").exists()


def test_verify_is_content_with_whole_files(folder: Path) -> None:
    result = invoke("verify", folder=folder)
    assert result.exit_code == 0, result.output
    assert "3 of 3 programs are whole, 3 records" in result.stdout


def test_verify_names_the_bad_ones(folder: Path) -> None:
    entry(folder, DIGESTS[1]).write_bytes(entry(folder, DIGESTS[1]).read_bytes()[:-1])
    record = next((folder / "records/recipe").iterdir())
    record.write_text(record.read_text().replace("program", "Program"))
    result = invoke("verify", folder=folder)
    assert result.exit_code == 1
    assert f"bad: {DIGESTS[1]}: holds 999 bytes of 1000" in result.stdout
    assert f"bad: record recipe/{record.stem}" in result.stdout
    assert "2 of 3 programs are whole" in result.stdout
    report = json.loads(invoke("verify", "--json", folder=folder).stdout)
    assert list(report["bad"]) == [DIGESTS[1]]
    assert report["bad_records"] == [f"recipe/{record.stem}"]


def test_verify_mends_the_index(folder: Path) -> None:
    manifest = folder / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace("2.5", "9.5"))
    assert "made anew" in invoke("verify", folder=folder).stdout
    assert manifest.read_text() == whole
    assert "made anew" not in invoke("verify", folder=folder).stdout


def test_verify_asks_for_signatures_where_there_is_a_key(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_bytes(b"sixteen bytes or more")
    secret.chmod(0o600)
    result = invoke("verify", "--signing-key", secret, folder=folder)
    assert result.exit_code == 1
    assert result.stdout.count("not signed, and a signing key is configured") == 3


def test_gc_removes_what_is_old_with_its_recipes(folder: Path) -> None:
    result = invoke("gc", "--max-age-days", "2.5", folder=folder)
    assert result.exit_code == 0, result.output
    assert str(SHAPES[0]) in result.stdout
    assert stored(folder) == {16, 32}
    assert len(CacheStore(folder).records()) == 2


def test_gc_removes_the_longest_unused_until_the_rest_fits(folder: Path) -> None:
    assert invoke("gc", "--max-bytes", "2500", folder=folder).exit_code == 0
    assert stored(folder) == {16, 32}


def test_gc_removes_nothing_in_a_dry_run(folder: Path) -> None:
    result = invoke("gc", "--max-bytes", "0", "--dry-run", folder=folder)
    assert "3 programs (0.00 MiB) would be removed" in result.stdout
    assert stored(folder) == {8, 16, 32}
    assert len(CacheStore(folder).records()) == 3


def test_gc_keeps_the_programs_of_a_plan(folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan_to_yaml(Plan.of(SHAPES[:1])))
    assert invoke("gc", "--max-age-days", "0", "--keep-plan", plan, folder=folder).exit_code == 0
    assert stored(folder) == {8}
    result = invoke("gc", "--max-bytes", "10", "--keep-plan", plan, folder=folder)
    assert result.exit_code == 1
    assert "max_bytes must be at least 1000, what keep_plan keeps" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-bytes", "-1"], "max_bytes must be at least 0"),
        (["--keep-plan", "plan.yaml"], "together with max_bytes or max_age_days"),
        (["--max-bytes", "1", "--keep-plan", "none.yaml"], "keep_plan must be a readable plan"),
    ],
)
def test_gc_refuses_what_makes_no_sense(folder: Path, words: list[str], message: str) -> None:
    result = invoke("gc", *words, folder=folder)
    assert result.exit_code == 1
    assert message in result.stderr
    assert stored(folder) == {8, 16, 32}


def test_gc_removes_what_killed_writers_left(folder: Path) -> None:
    old, young = folder / "entries/.writing-old", folder / "entries/.writing-young"
    aside = folder / "set_aside" / f"{DIGESTS[0]}-1.executable"
    aside.parent.mkdir()
    for path in (old, young, aside):
        path.write_text("")
    long_ago_s = time.time() - 8 * DAY_S
    for path in (old, aside):
        os.utime(path, (long_ago_s, long_ago_s))
    assert "2 leftover files removed" in invoke("gc", folder=folder).stdout
    assert [path.exists() for path in (old, young, aside)] == [False, True, False]
    assert stored(folder) == {8, 16, 32}


def test_pack_and_unpack_carry_a_cache(folder: Path, tmp_path: Path) -> None:
    archive, target = tmp_path / "cache.tar", tmp_path / "elsewhere/cache"
    result = invoke("pack", archive, folder=folder)
    assert result.exit_code == 0, result.output
    assert "3 programs packed" in result.stdout
    result = invoke("unpack", archive, folder=target)
    assert "3 programs and 3 records added, 0 programs were there already" in result.stdout
    assert stored(target) == {8, 16, 32}


def test_pack_leaves_damaged_programs_out_and_says_so(folder: Path, tmp_path: Path) -> None:
    entry(folder, DIGESTS[0]).write_text("damaged")
    result = invoke("pack", tmp_path / "cache.tar", folder=folder)
    assert result.exit_code == 1
    assert f"left out: {DIGESTS[0]}" in result.stderr
    assert "2 programs packed" in result.stdout


def test_a_pack_that_fails_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    result = invoke("pack", tmp_path / "none/cache.tar", folder=folder)
    assert result.exit_code == 1
    (tmp_path / "cut.tar").write_bytes(b"hello")
    result = invoke("unpack", tmp_path / "cut.tar", folder=folder)
    assert result.exit_code == 1
    assert "no archive of a compile cache" in result.stderr
    assert stored(folder) == {8, 16, 32}
