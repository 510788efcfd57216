"""A warm-up: every program of one configuration, compiled into its cache for named devices.

Owns the choice of devices and of the mesh where none was named, and the roofline that a shape is
compared with. Finding and compiling are `buckets`' part, flags and display the command's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from buckets.cache_store import CacheStore
from buckets.device_profile import DeviceProfile, ProfileTarget, ShapeProfile
from buckets.executable import ExecutableSource
from buckets.executable_facts import ExecutableFacts
from buckets.plan import Plan
from buckets.plan_file import with_profile
from buckets.program_key import cache_key
from buckets.shape import StepShape
from buckets.warmup import WarmedShape, already_stored, warm_up
from kernels.chips import chip_of
from tpu_engine.compile_store import open_store
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig
from tpu_engine.models.config import ModelConfig
from tpu_engine.models.sharding import TENSOR
from tpu_engine.prepare import bytes_per_device, prepare
from tpu_engine.state_program import NEW_STATE, StateProgram
from tpu_engine.target import StepTarget
from tpu_engine.topology import target_devices


@dataclass(frozen=True, slots=True)
class WarmUp:
    """All that a worker process needs to open the same programs as everybody else.

    Attributes:
        config: as a server would be given it.
        topology: name of the devices; None for this machine's.
        plan: None reads the configured one or derives one.
    """

    config: EngineConfig
    model: ModelConfig
    num_token_ids: int
    topology: str | None = None
    plan: Plan | None = None

    def open(self) -> tuple[StepTarget, CacheStore]:
        """The programs and where they are kept; raises `InvalidConfig` like a server's start."""
        store = open_store(self.config)
        if store is None:
            raise InvalidConfig("compile_cache", "given: a warm-up fills it", None)
        devices = target_devices(self.topology)
        return prepare(self.config, self.model, self.num_token_ids, devices, self.plan), store

    def stored(self) -> Mapping[StepShape, ExecutableFacts]:
        """What the cache has already, found without lowering."""
        target, store = self.open()
        return already_stored(target, store, target.plan.shapes)

    def warm_state(self) -> None:
        """Compiles and stores the small program that allocates pages, if the cache lacks it."""
        target, store = self.open()
        ExecutableSource(StateProgram(target), store).compile_missing(NEW_STATE)

    def run(self, shapes: tuple[StepShape, ...], jobs: int) -> Iterator[WarmedShape]:
        """Compiles `shapes` in `jobs` processes, the largest first: they take longest."""
        yield from warm_up(self.open, sorted(shapes, reverse=True), jobs)


def with_mesh(
    config: EngineConfig, model: ModelConfig, mesh: str | None, num_devices: int
) -> EngineConfig:
    """Puts "tensor=8" into the configuration; without one, as many devices as divide the model.

    A `tensor_parallel` that was chosen stays where no mesh is named. Raises `InvalidConfig`.
    """
    if mesh is None:
        if config.tensor_parallel > 1:
            return config
        return replace(config, tensor_parallel=most_devices(model, num_devices))
    axis, _, size = mesh.partition("=")
    if axis != TENSOR or not size.isdecimal() or int(size) < 1:
        raise InvalidConfig("mesh", f"{TENSOR}=N", mesh)
    if config.tensor_parallel not in (1, int(size)):
        limit = f"{TENSOR}={config.tensor_parallel}, as tensor_parallel says"
        raise InvalidConfig("mesh", limit, mesh)
    return replace(config, tensor_parallel=int(size))


def most_devices(model: ModelConfig, num_devices: int) -> int:
    """The largest number that divides everything that is sharded, and the devices themselves."""
    sharded = (num_devices, model.num_kv_heads, model.intermediate_size, model.vocab_size)
    return max(n for n in range(1, num_devices + 1) if all(size % n == 0 for size in sharded))


def roofline_step_s(target: StepTarget, shape: StepShape) -> float | None:
    """Seconds one step can't go below on this chip, at context 0; None for a CPU.

    The larger of: reading the weights once, and the multiplications at the matrix units' peak.
    Attention and collectives come on top. (Williams, Waterman, Patterson 2009.)
    """
    device = target.devices[0]
    if device.platform == "cpu":
        return None
    chip = chip_of(device.device_kind)
    # The table is per core; a device may have two (v4 and v5p).
    cores = getattr(device, "num_cores", 1)
    num_layers, num_devices = target.model.num_layers, target.mesh.size
    per_token = sum(
        math.prod(spec.shape) * num_layers
        for spec in target.specs.values()
        if spec.num_in and spec.stacked
    )
    logits = target.model.hidden_size * target.model.vocab_size
    flops = 2 * (per_token * shape.num_tokens + logits * shape.num_logit_rows) / num_devices
    seconds = (
        bytes_per_device(target.weights) / chip.hbm_bytes_per_s,
        flops / chip.bf16_flops,
    )
    return max(seconds) / cores


def profile_of(target: StepTarget, facts: Mapping[StepShape, ExecutableFacts]) -> DeviceProfile:
    """What the compiler said, as the plan file keeps it.

    FLOPs, bytes and the step's estimate stay out: the compiler counts a scanned layer once.
    """
    device, config, model = target.devices[0], target.config, target.model
    options = (config.dtype, f"kv {config.kv_dtype}", config.quantize, config.attention)
    size = f"{model.architecture} {model.num_layers} x {model.hidden_size}"
    pages = f"{config.num_pages} pages of {config.page_size}"
    shapes = {
        shape: ShapeProfile(
            compile_s=round(one.compile_s, 3),
            hbm_bytes=one.hbm_bytes,
            temp_bytes=one.temp_bytes,
            code_bytes=one.code_bytes,
            roofline_step_s=roofline_step_s(target, shape),
        )
        for shape, one in facts.items()
    }
    key = cache_key("", target.plan.shapes[0], target.devices, target.mesh_axes, {})
    is_cpu = device.platform == "cpu"
    chip = device.device_kind if is_cpu else chip_of(device.device_kind).name
    named = ProfileTarget(", ".join((size, *options, pages)), chip, key.mesh, key.versions)
    return DeviceProfile(named, shapes)


def keep_profile(target: StepTarget, facts: Mapping[StepShape, ExecutableFacts]) -> str:
    """Writes the profile into the configured plan file; returns "" or why it could not."""
    if target.config.plan is None or not facts:
        return ""
    path = Path(target.config.plan).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        path.write_text(with_profile(text, profile_of(target, facts)), encoding="utf-8")
    except OSError as error:
        return f"{path} keeps no profile: {error.strerror}"
    return ""
