"""What an engine computes attention with: the choice, its refusals, and the kernels end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from buckets.plan import Plan
from buckets.shape import StepShape
from kernels.chips import CHIPS, chip_of
from tests import engine_rig, tiny_model
from tpu_engine.build import build_engine
from tpu_engine.config import EngineConfig
from tpu_engine.derive import derive
from tpu_engine.errors import InvalidConfig
from tpu_engine.kernel_choice import KernelChoice, choose_kernels
from tpu_engine.models.config import ModelConfig
from tpu_engine.request import SamplingParams
from tpu_engine.weights.open_model import open_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return open_model(tiny_model.write_hf(tmp_path_factory.mktemp("model"))).config


def choice(model: ModelConfig, platform: str, kind: str, **options: object) -> KernelChoice:
    config = derive(EngineConfig(model="", **options), model, platform)  # type: ignore[arg-type]
    return choose_kernels(config, model, 512, kind)


def test_auto_is_the_kernels_on_a_tpu_and_xla_elsewhere(model: ModelConfig) -> None:
    on_cpu = choice(model, "cpu", "cpu")
    assert (on_cpu.attention, on_cpu.sampling, on_cpu.plan) == ("xla", "xla", None)
    assert on_cpu.layout.width == model.head_dim
    on_tpu = choice(model, "tpu", "TPU v6 lite")
    assert (on_tpu.attention, on_tpu.sampling) == ("pallas", "pallas")
    assert on_tpu.plan is not None
    assert on_tpu.layout.width == 128


def test_pallas_without_a_tpu_is_refused_by_name(model: ModelConfig) -> None:
    with pytest.raises(
        InvalidConfig, match=r"attention must be .*pallas-interpret on cpu.*got .pallas"
    ):
        choice(model, "cpu", "cpu", attention="pallas")
    with pytest.raises(InvalidConfig, match=r"attention must be .*got .mosaic"):
        choice(model, "cpu", "cpu", attention="mosaic")


def test_a_chip_nobody_knows_and_pages_no_kernel_reads_are_refused(model: ModelConfig) -> None:
    with pytest.raises(InvalidConfig, match="device kind must be one of TPU v4, "):
        choice(model, "tpu", "TPU v9")
    with pytest.raises(InvalidConfig, match="page_size must be a power of two of at least 16"):
        choice(model, "tpu", "TPU v6 lite", page_size=8)
    assert choice(model, "tpu", "TPU v9", attention="xla").attention == "xla"


def test_every_chip_is_known_by_its_device_kind() -> None:
    assert [chip_of(chip.device_kind) for chip in CHIPS.values()] == list(CHIPS.values())


def test_sampling_falls_back_where_a_vocabulary_does_not_fit(model: ModelConfig) -> None:
    config = derive(EngineConfig(model=""), model, "tpu")
    assert choose_kernels(config, model, 262_144, "TPU v4").sampling == "xla"
    assert choose_kernels(config, model, 262_144, "TPU v6 lite").sampling == "pallas"


@pytest.mark.parametrize(
    "kv_dtype", ["float32", pytest.param("float8_e4m3fn", marks=pytest.mark.long)]
)
@pytest.mark.timeout(600)
def test_interpreted_kernels_give_the_tokens_of_xla(tmp_path: Path, kv_dtype: str) -> None:
    """Chunks across page borders beside decodes, greedy and drawn, through the whole engine."""
    model_dir = tiny_model.write_hf(tmp_path)
    greedy = SamplingParams(max_tokens=3, ignore_eos=True)
    drawn = replace(greedy, temperature=0.8, top_p=0.9, top_k=50, seed=1)
    prompts = [tuple(range(3, 3 + count)) for count in (1, 15, 33, 50)]
    batch = [
        *engine_rig.requests(prompts[:2], greedy),
        *engine_rig.requests(prompts[2:], drawn, first_id=3),
    ]
    tokens: list[dict[int, list[int]]] = []
    for attention in ("xla", "pallas-interpret"):
        config = EngineConfig(
            model=str(model_dir),
            attention=attention,
            kv_dtype=kv_dtype,
            page_size=32,
            max_model_len=64,
            max_num_seqs=3,
            max_num_batched_tokens=40,
            compile_cache="",
        )
        engine = build_engine(config, plan=Plan.of([StepShape(40, 3, 2, 3)]))
        tokens.append(engine_rig.serve(engine, batch))
    assert tokens[0] == tokens[1]
