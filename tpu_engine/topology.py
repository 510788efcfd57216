"""Devices that aren't there: compile targets made from a topology's name.

Owns the way from a name such as "v6e:2x4" to devices a program can be compiled for, by the TPU
compiler (libtpu) on any machine. Nothing can run on them. The environment variables that keep
libtpu from looking for a TPU are the caller's business, before the first call.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
from jax.experimental import topologies

from kernels.chips import CHIPS
from tpu_engine.errors import InvalidConfig

CPU = "cpu"
# JAX shows a v4 chip as one device with two cores; the compiler's own default is two devices.
_CHIP_CONFIGS = {"v4": "megacore"}


def target_devices(topology: str | None) -> list[Any]:
    """The devices called so; None and "cpu" are this machine's.

    Raises `InvalidConfig` for a name nobody knows, and where the TPU compiler isn't installed.
    """
    if topology is None or topology == CPU:
        return list(jax.devices())
    chip = topology.partition(":")[0]
    if chip not in CHIPS:
        raise InvalidConfig("topology", f"cpu or one like {_examples()}", topology)
    if importlib.util.find_spec("libtpu") is None:
        limit = "cpu where the TPU compiler is missing (pip install 'tpu-engine[tpu]' has it)"
        raise InvalidConfig("topology", limit, topology)
    more = {"chip_config_name": _CHIP_CONFIGS[chip]} if chip in _CHIP_CONFIGS else {}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **more)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        limit = f"one the TPU compiler knows, like {_examples()} ({reason})"
        raise InvalidConfig("topology", limit, topology) from error
    return list(found.devices)


def _examples() -> str:
    return ", ".join(chip.topology for chip in CHIPS.values())
