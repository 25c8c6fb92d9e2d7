"""Strict JAX for every test, a compilation cache across runs, and models to test with."""

import dataclasses
import functools
import gc
import itertools
import json
import os
import pathlib
import shutil
import signal

import jax
import jax.numpy as jnp
import jaxlib.version
import jaxtyping
import pytest
from jax._src.interpreters import mlir
from safetensors.numpy import load_file

from kvjax import models

# Most of the suite's time is compilation of programs that run for milliseconds.
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jaxlib.version.__version_info__ < (0, 11):  # later ones have no choice, and no such flag
    QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_TO_COMPILE}"
# A context of its own for each program takes 3 ms to make and a megabyte, which stays and makes the next ones slower.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)
gc.set_threshold(100_000, 50, 100)  # what tracing allocates is many small objects that live
jax.config.update("jax_traceback_in_locations_limit", 0)  # a tenth of the time, for nothing that a test reads
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
CACHE = {
    "jax_compilation_cache_dir": str(pathlib.Path(__file__).parents[1] / ".jax_cache"),
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}
for option, value in CACHE.items():
    jax.config.update(option, value)
    os.environ[option.upper()] = str(value)  # for the processes that tests start

MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPS = 40_000  # compiled programs map memory, and Linux kills a process with 65,530 mappings
_TESTS = itertools.count(1)  # reading what is mapped takes as long as many a test


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as slow what is exhaustive, before `-m` selects."""
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker("slow")


@pytest.fixture
def interruptible():
    """Ctrl-C ends what tests start, as it does not where a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _bounded_mappings():
    yield
    if next(_TESTS) % 25 == 0 and MAPS.is_file() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture
def unchecked(monkeypatch):
    """What a user gets, who runs no type checker; it would answer wrong types before the library does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def as_users_run_it():
    """Users have the promotion of JAX itself."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


SHARED_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def examples():
    """The numeric examples by id."""
    file = pathlib.Path(__file__).parent / "golden" / "policy_examples.json"
    return {e["id"]: e for e in json.loads(file.read_text())["examples"]}


@pytest.fixture(scope="session")
def tiny():
    """A small random model, its weights large enough for attention to differ between tokens."""
    config = models.ModelConfig(
        vocab_size=61, embed_dim=32, mlp_dim=48, num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=8
    )
    model = models.LanguageModel(config)
    return model, jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), jax.jit(model.init)(jax.random.key(7)))


@pytest.fixture(scope="session")
def shallow(tiny):
    """The first layer of `tiny` with its embedding and head: what does not tell layers apart compiles in a third."""
    model, params = tiny
    config = dataclasses.replace(model.config, num_layers=1)
    return models.LanguageModel(config), {n: p for n, p in params.items() if n not in ("layers_1", "layers_2")}


@pytest.fixture(scope="session")
def saved(tmp_path_factory, tiny):
    """The directory of a saved model."""
    path = tmp_path_factory.mktemp("saved")
    models.save(path, *tiny)
    return path


@pytest.fixture
def checkpoint(tmp_path, saved):
    """A saved model, and its config and tensors to be spoiled."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path, json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")


@pytest.fixture(scope="session")
def wide():
    """A small random model that computes in float64."""
    from tests.float64 import Wide

    with jax.enable_x64(True):
        return Wide(), jax.tree.map(jnp.asarray, Wide.init())


@pytest.fixture(scope="session")
def embedded():
    """The model that comes with the project, and its tokenizer."""
    from kvjax.models.embedded import EMBEDDED

    return *models.load(EMBEDDED), models.load_tokenizer(EMBEDDED)


@pytest.fixture(scope="session")
def shared_data():
    """Data beside the project, or a skip with the reason."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"{SHARED_DATA} is absent: this test needs real data from beside the project")
    return SHARED_DATA


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The directory of a finished small run with all tasks and one baseline."""
    from kvjax.experiments import run
    from tests import runs

    directory = tmp_path_factory.mktemp("finished") / "snapkv"
    run.main(["--config", "snapkv.py", *runs.small(), "--baselines", "random", "--output", str(directory)])
    return directory


@pytest.fixture
def made(monkeypatch, embedded):
    """Results of runs are made up."""
    from tests import runs

    runs.make_up(monkeypatch, embedded)
