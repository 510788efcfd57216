"""The benchmark's own logic: workload, rounds, medians, and drivers that misbehave."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.cpu_serving import CONTRACT, Samples, run_rounds, summarize
from benchmarks.driver_process import Driver, DriverFailed, DriverRun, run_driver
from benchmarks.thread_times import grouped, thread_seconds
from benchmarks.warm_start import Start
from benchmarks.warm_start import summarize as start_medians
from benchmarks.workload import cpu_workload

SAYS_TWO_VALUES = """
import json
print("a library says hello")
print(json.dumps({"event": "ready", "ready_s": 1.5, "version": "x"}), flush=True)
for number in (10.0, 30.0):
    print(json.dumps({"event": "value", "name": "decode_tok_s", "value": number}), flush=True)
"""


def script(code: str, folder: Path) -> Driver:
    return Driver("fake", [sys.executable, "-c", code], folder)


def ignore(name: str, number: float) -> None:
    pass


def test_workload_is_the_same_every_time() -> None:
    workload = cpu_workload(2)
    assert workload == cpu_workload(2)
    assert workload != cpu_workload(2, seed=1)
    assert len(workload.prefill_prompt) == 512
    assert {len(prompt) for prompt in workload.concurrent_prompts} == {32}
    assert len(workload.concurrent_prompts) >= max(workload.levels)
    assert json.loads(json.dumps(workload.as_json()))["repeats"] == 2


def test_driver_lines_are_gathered(tmp_path: Path) -> None:
    run = run_driver(script(SAYS_TWO_VALUES, tmp_path), tmp_path / "log", ignore, 60)
    assert run.ready_s == 1.5
    assert run.facts == {"version": "x"}
    assert run.values == {"decode_tok_s": [10.0, 30.0]}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no such model')", "no such model"),
        ("print('nothing measured')", "exit code 0"),
        ("import os; os.abort()", "exit code -6"),
    ],
)
def test_failed_driver_is_named_with_its_last_words(code: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DriverFailed, match=said):
        run_driver(script(code, tmp_path), tmp_path / "log", ignore, 60)


def test_driver_over_its_time_is_ended(tmp_path: Path) -> None:
    with pytest.raises(DriverFailed, match="exit code -9"):
        run_driver(
            script("import threading; threading.Event().wait()", tmp_path),
            tmp_path / "log",
            ignore,
            0.2,
        )


def test_every_engine_runs_once_per_round(tmp_path: Path) -> None:
    samples, loads = run_rounds([script(SAYS_TWO_VALUES, tmp_path)], 3, tmp_path)
    assert samples["fake"].all("decode_tok_s") == [10.0, 30.0] * 3
    assert [load["round"] for load in loads] == [1, 2, 3]
    assert summarize(samples)["fake"]["decode_tok_s"] == 20.0


def of(ready_s: float, **values: float) -> DriverRun:
    return DriverRun(ready_s, {}, {name: [number] for name, number in values.items()})


def test_first_start_is_cold_and_later_ones_are_warm() -> None:
    samples = Samples([of(60.0, x=1.0), of(4.0, x=2.0), of(6.0, x=9.0)])
    assert samples.starts() == {"ready_cold_s": 60.0, "ready_warm_s": 5.0}
    assert samples.medians() == {"x": 2.0}
    assert Samples([of(60.0)]).starts()["ready_warm_s"] is None


def test_what_is_compared_is_ours_behind_grpc() -> None:
    values = dict.fromkeys(CONTRACT, 80.0)
    bare = {f"bare_{name}": 100.0 for name in CONTRACT}
    engines = summarize(
        {
            "offline": Samples([of(2.0, **dict.fromkeys(CONTRACT, 96.0), **bare)]),
            "grpc": Samples([of(3.0, **values)]),
            "llama_cpp": Samples([of(1.0, **values)]),
        }
    )
    assert list(engines) == ["tpu_engine", "llama_cpp"]
    ours = engines["tpu_engine"]
    assert {name: ours[name] for name in CONTRACT} == values
    assert ours["bare_step_tok_s"] == 100.0
    assert ours["ready_cold_s"] == 3.0
    assert ours["share_of_bare"]["offline.concurrent_32_tok_s"] == 0.96
    assert ours["share_of_bare"]["grpc.concurrent_32_tok_s"] == 0.8


def test_cpu_time_of_a_thread_is_seen() -> None:
    burnt, release = threading.Event(), threading.Event()

    def burn() -> None:
        sum(range(1_000_000))
        burnt.set()
        release.wait()

    before = thread_seconds(os.getpid())
    thread = threading.Thread(target=burn)
    thread.start()
    burnt.wait()
    after = thread_seconds(os.getpid())
    release.set()
    thread.join()
    assert thread.native_id is not None
    assert after[thread.native_id][1] > 0
    assert grouped(os.getpid(), before, after)["other"] >= after[thread.native_id][1]


def test_threads_are_grouped_by_name() -> None:
    after = {1: ("python", 1.0), 2: ("tf_XLAEigen", 2.0), 3: ("grpc_global_tim", 3.0)}
    after[4] = ("python", 4.0)
    assert grouped(1, {4: ("python", 1.5)}, after) == {
        "front": 1.0,
        "compute": 2.0,
        "transport": 3.0,
        "other": 2.5,
    }


def test_starts_are_summed_up_by_kind() -> None:
    cold = [Start(s, 9, 0, s - 2, 0.0, 1.0, 0.2) for s in (60.0, 50.0, 90.0)]
    warm = [Start(4.0, 0, 9, 0.0, 1.0, 1.0, 0.2)]
    medians = start_medians({"cold": cold, "warm": warm})
    assert medians["cold"]["serving_s"] == 60.0
    assert medians["cold"]["compile_s"] == 58.0
    assert medians["warm"] == {
        "serving_s": 4.0,
        "programs_compiled": 0,
        "programs_loaded": 9,
        "compile_s": 0.0,
        "load_s": 1.0,
    }
