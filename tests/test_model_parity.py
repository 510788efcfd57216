"""Teacher-forced logits of the tiny model against transformers' float32 logits, stored and live.

The stored fixture is written by `tests/make_parity_fixture.py`; largest absolute difference
allowed: `TOLERANCE`. Also tensor parallelism: two devices give what one gives.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels.attention import attention_work, ragged_paged_attention
from kernels.attention.cache_layout import kv_layout
from tests import tiny_model
from tpu_engine.models.loading import load_weights
from tpu_engine.models.registry import family_of
from tpu_engine.models.sharding import make_mesh
from tpu_engine.weights.open_model import open_model

TOLERANCE = 2e-5
CHUNK = 37  # crosses pages (16) and the prompt's end at odd places
PAGE_SIZE = 16
PAGES = 12


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("parity")
    tiny_model.write_hf(directory)
    return directory


def our_logits(model_dir: Path, ids: np.ndarray, chunk: int) -> np.ndarray:
    """All logits `[len(ids), V]`, computed in chunks over the paged cache."""
    opened = open_model(model_dir)
    family = family_of(opened.config)
    build = partial(family.build, opened.config, jnp.dtype(jnp.float32), False)
    graph, abstract = nnx.split(nnx.eval_shape(build))
    specs = family.weight_specs(opened.config)
    weights = load_weights(abstract, specs, opened.source, make_mesh(1), lambda *_: None)
    page_table = jnp.arange(1, PAGES + 1, dtype=jnp.int32)[None]

    @jax.jit
    def step(weights, cache, tokens, kv_len, q_len):
        batch = (page_table, kv_len[None], jnp.stack([0, q_len]), jnp.int32(1))
        work = attention_work(*batch, num_tokens=chunk, page_size=PAGE_SIZE)

        def attend(q, k, v, cache, layer):
            return ragged_paged_attention(q, k, v, cache, layer, *batch, work=work)

        model = nnx.merge(graph, weights)
        hidden, cache = model(tokens, work.places.positions, cache, attend)
        return model.logits(hidden), cache

    layout = kv_layout(
        num_kv_heads=opened.config.num_kv_heads,
        head_dim=opened.config.head_dim,
        page_size=PAGE_SIZE,
        dtype="float32",
    )
    shape = layout.shape(opened.config.num_layers, PAGES + 1)
    cache, rows = jnp.full(shape, jnp.nan), []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        tokens = np.zeros(chunk, np.int32)
        tokens[: len(part)] = part
        kv_len = np.int32(start + len(part))
        logits, cache = step(weights, cache, tokens, kv_len, np.int32(len(part)))
        rows.append(np.asarray(logits[: len(part)]))
    return np.concatenate(rows)


@pytest.mark.parametrize("i", range(3))
def test_logits_equal_transformers_stored(model_dir: Path, repo_root: Path, i: int) -> None:
    stored = np.load(repo_root / "tests" / "fixtures" / "tiny_llama_logits.npz")
    logits = our_logits(model_dir, stored[f"ids_{i}"], CHUNK)
    difference = np.abs(logits - stored[f"logits_{i}"]).max()
    assert np.ptp(stored[f"logits_{i}"]) > 0.5, "the fixture says nothing"
    assert difference < TOLERANCE


@pytest.mark.peers
@pytest.mark.timeout(600)
def test_logits_equal_transformers_live(model_dir: Path, repo_root: Path, tmp_path: Path) -> None:
    python = repo_root / ".peers" / "transformers" / "bin" / "python"
    if not python.exists():
        pytest.skip("peer transformers is not installed (make peers)")
    output = tmp_path / "live.npz"
    script = repo_root / "tests" / "make_parity_fixture.py"
    subprocess.run([python, script, model_dir, output], check=True)
    live = np.load(output)
    for i in range(3):
        logits = our_logits(model_dir, live[f"ids_{i}"], CHUNK)
        assert np.abs(logits - live[f"logits_{i}"]).max() < TOLERANCE


_SHARDED = """
import sys
from dataclasses import replace
from pathlib import Path
import jax
from tests.engine_rig import Rig, prompts, requests, serve
from tpu_engine.request import SamplingParams
assert len(jax.devices()) == 2
rig = Rig(Path(sys.argv[1]), Path(sys.argv[2]))
batch = requests(prompts(8), SamplingParams(max_tokens=12, ignore_eos=True))
batch += [replace(one, request_id=one.request_id + 100, params=replace(one.params, seed=3,
          temperature=1.0, top_p=0.9)) for one in batch]
one = serve(rig.build("one shape"), batch)
two = serve(rig.build("one shape", tensor_parallel=2), batch)
assert one == two, (one, two)
assert rig.build("one shape", tensor_parallel=2).compile_count() == 0
int8 = serve(rig.build("one shape", quantize="int8"), batch)
assert serve(rig.build("one shape", quantize="int8", tensor_parallel=2), batch) == int8
"""


def test_two_devices_give_the_tokens_of_one(model_dir: Path, repo_root: Path, tmp_path: Path):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run(
        [sys.executable, "-c", _SHARDED, model_dir, tmp_path],
        check=True,
        cwd=repo_root,
        env=environment,
    )
