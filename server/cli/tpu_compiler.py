"""The environment of processes that compile for TPUs on a machine without one.

Owns the variables; which flags the compiler gets besides is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Mapping

# libtpu looks for no TPU and no metadata server, and several processes may load it.
VARIABLES: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
}
# JAX gives this to the compiler on every TPU host: without it nothing compiled here is found there.
_HOST_FLAG = "--xla_tpu_use_enhanced_launch_barrier"


def warm_up_variables(given: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment `given`, so that programs are those of a TPU host."""
    flags = given.get("LIBTPU_INIT_ARGS", "")
    if _HOST_FLAG not in flags:
        flags = f"{flags} {_HOST_FLAG}=true".strip()
    return {**VARIABLES, "LIBTPU_INIT_ARGS": flags}
