"""The cache key of a lowered program: canonical text, target, versions, flags.

Owns what goes into each component of a `CacheKey` and how source positions are kept out of it.
Reads the environment variables a compiler reads; knows no files of a cache and no engine.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax.extend.mlir import ir

from buckets.cache_key import CacheKey
from buckets.shape import StepShape

CompilerOptions = Mapping[str, str | int | float | bool]

_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# What the compiler writes elsewhere, or how many devices the host pretends to have, is no code.
_IDLE_FLAGS = re.compile(r"--xla_(dump_|force_host_platform_device_count|hlo_profile)\S*")
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


def program_fingerprint(lowered: jax.stages.Lowered) -> str:
    """SHA-256 of a program's StableHLO, without source positions anywhere.

    JAX prints no positions, but the kernels inside are kept as bytecode with the positions of
    their Python lines: each is replaced by the digest of its text without them. A payload nobody
    can read stays as it is, which may cost a hit and never gives a wrong one.
    """
    text = lowered.as_text()
    module: Any = lowered.compiler_ir("stablehlo")
    for body in _kernel_bodies(module):
        canonical = _without_positions(body, module.context)
        if canonical is not None:
            text = text.replace(body, hashlib.sha256(canonical.encode()).hexdigest())
    return hashlib.sha256(text.encode()).hexdigest()


def cache_key(
    program: str,
    shape: StepShape,
    devices: Sequence[Any],
    mesh_axes: Mapping[str, int],
    options: CompilerOptions,
) -> CacheKey:
    """The key of `program` (a fingerprint) compiled here, now, for `devices`."""
    is_cpu = devices[0].platform == "cpu"
    return CacheKey(
        program=program,
        shape=str(shape),
        devices=_arrangement(devices),
        mesh=", ".join(f"{axis}={size}" for axis, size in mesh_axes.items()),
        compiler_options=json.dumps(dict(options), sort_keys=True),
        versions=_versions(("jax", "jaxlib") if is_cpu else ("jax", "jaxlib", "libtpu")),
        flags="\n".join(_flags()),
        host=_cpu_features() if is_cpu else "",
    )


def _kernel_bodies(module: Any) -> set[str]:
    """The base64 payloads of the module's kernels."""
    found: set[str] = set()

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            found.update(_payload(operation))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _payload(operation: Any) -> Iterator[str]:
    if ir.StringAttr(operation.attributes["call_target_name"]).value != "tpu_custom_call":
        return
    config = json.loads(ir.StringAttr(operation.attributes["backend_config"]).value)
    body = config.get("custom_call_config", {}).get("body")
    if isinstance(body, str):
        yield body


def _without_positions(body: str, context: Any) -> str | None:
    """The text of a kernel's bytecode without locations; None where it can't be read."""
    # The program's context knows the types of kernels, not the operations of their stable form.
    was_open = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
        with context:
            module = ir.Module.parse(base64.b64decode(body, validate=True))
            return str(module.operation.get_asm(enable_debug_info=False))
    except (ir.MLIRError, binascii.Error):
        return None
    finally:
        context.allow_unregistered_dialects = was_open


def _arrangement(devices: Sequence[Any]) -> str:
    """ "TPU v6 lite x 8, 2x4x1": kind, number, and the box their coordinates fill."""
    named = f"{devices[0].device_kind} x {len(devices)}"
    if devices[0].platform == "cpu":
        return named
    corners = zip(*(device.coords for device in devices), strict=True)
    return f"{named}, " + "x".join(str(max(axis) - min(axis) + 1) for axis in corners)


def _versions(packages: tuple[str, ...]) -> str:
    return ", ".join(f"{package} {_version(package)}" for package in packages)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a TPU machine may bring its own libtpu, without metadata
        return "not installed"


def _flags() -> Iterator[str]:
    for name in _FLAG_VARIABLES:
        flags = sorted(_IDLE_FLAGS.sub("", os.environ.get(name, "")).split())
        if flags:
            yield f"{name}={' '.join(flags)}"
    for name in _JAX_SETTINGS:
        yield f"{name}={getattr(jax.config, name)}"


def _cpu_features() -> str:
    """Model and feature flags of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            wanted = ("flags", "Features", "model name")
            found = {line.partition(":")[2].strip() for line in lines if line.startswith(wanted)}
            return "; ".join(sorted(found))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
