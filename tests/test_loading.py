"""How weights come in: strip by strip, in one dtype, on the devices that are named, from where they are kept."""

import fnmatch
import itertools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from kvjax import models
from kvjax.experiments import run
from kvjax.experiments.bench import loading
from kvjax.experiments.bench.peers.checkpoints import checkpoint as checkpoint_of
from kvjax.models import stored
from kvjax.models.embedded import EMBEDDED
from tests.test_weights import assert_same

DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny):
    path = tmp_path_factory.mktemp("saved")
    models.save(path, *tiny, dtype="bfloat16")
    return path


@pytest.fixture
def checkpoint(tmp_path, saved):
    """A model saved in bfloat16, to be spoiled."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_part_of_a_tensor_is_read_as_numpy_converts_it(tmp_path, monkeypatch, flip, threads):
    """Strips of several rows and of less than one, parts of several threads, of whole tensors and of slices."""
    monkeypatch.setattr(stored, "WORKERS", threads)
    monkeypatch.setattr(stored, "_PART", 16)
    monkeypatch.setattr(stored, "_STRIP", 100)
    x = np.random.default_rng(0).normal(size=(70, 21))
    x[[3, 66, 67], [2, 20, 0]] = np.inf, np.nan, 1e5  # of float16, the last is infinite as well
    names = {
        kind: x.astype(jnp.dtype(kind)) if kind != "float16" else np.clip(x, -60000, 60000).astype(kind)
        for kind in DTYPES
    }
    save_file(names, tmp_path / "x.safetensors")
    tensors = stored.stored_tensors([tmp_path / "x.safetensors"])
    rows, columns = (slice(None), slice(5, 68), slice(66, 70)), (slice(None), slice(4, 21))
    with ThreadPoolExecutor(threads) as pool:
        for kind, to, index in itertools.product(DTYPES, DTYPES, itertools.product(rows, columns)):
            with np.errstate(over="ignore"):
                wanted = names[kind][index].astype(jnp.dtype(to))
            out = stored.empty(wanted.shape[::-1] if flip else wanted.shape, to)
            lost = stored.fill(out.T if flip else out, tensors[kind], index, pool)
            read = out.T if flip else out
            np.testing.assert_array_equal(read.astype(np.float64), wanted.astype(np.float64))
            assert lost == ((~np.isfinite(wanted)).sum(), (~np.isfinite(names[kind][index])).sum())


def test_what_is_read_is_what_jax_holds():
    for shape in ((3, 5), (300, 500), (0, 4), (7,)):
        x = stored.empty(shape, "bfloat16")
        taken = jax.device_put(x)
        assert taken.shape == shape
        assert x.size == 0 or taken.unsafe_buffer_pointer() == x.ctypes.data


def test_a_file_that_is_cut_while_it_is_read(checkpoint):
    file = checkpoint / "model.safetensors"
    tensors = stored.stored_tensors([file])
    os.truncate(file, 10_000)
    tensor = max(tensors.values(), key=lambda t: t.offset)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match=r"model.safetensors has been cut short while"):
        stored.fill(np.zeros(tensor.shape, jnp.bfloat16), tensor, (slice(None),) * len(tensor.shape), pool)


def test_auto_is_the_dtype_that_is_stored(checkpoint):
    model, params = models.load(checkpoint, dtype="auto")
    assert model.config.dtype == "bfloat16"
    assert_same(params, models.load(checkpoint, dtype="bfloat16")[1])
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float16)  # no parameter
    save_file(tensors, checkpoint / "model.safetensors")
    mixed = (
        r"stores bfloat16 \(29 tensors, such as lm_head.weight\) and float32 \(1 tensors, such as model.norm.weight\)"
    )
    with pytest.raises(ValueError, match=rf"{mixed}.* give dtype= one of \['bfloat16', 'float32'\]"):
        models.load(checkpoint, dtype="auto")
    save_file({n: x.astype(np.float64) for n, x in tensors.items()}, checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match=r"dtype='float64' needs 64 bits in jax; set jax_enable_x64, or give another"):
        models.load(checkpoint, dtype="auto")


def one_device(*spec):
    return NamedSharding(jax.make_mesh((1,), ("x",)), P(*spec))


def test_parameters_go_where_a_sharding_says(checkpoint):
    expected, one, seen = models.load(checkpoint)[1], one_device("x"), {}

    def place(path, shape):
        seen[path] = shape
        return one if len(shape) == 2 else SingleDeviceSharding(jax.devices()[0])

    params = models.load(checkpoint, sharding=place)[1]
    assert_same(params, expected)
    assert params["layers_0"]["self_attn"]["o_proj"]["weight"].sharding == one
    assert seen["layers_0/self_attn/qkv_proj/weight"] == (2, 4, 8, 32)
    assert_same(models.load(checkpoint, sharding=one)[1], expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (lambda: "x", "sharding='x' is neither a jax.sharding.Sharding nor a function"),
        (lambda: lambda *_: None, r"sharding gave None for embed_tokens of shape \(61, 32\), not a jax.sharding"),
        (lambda: one_device("x", None), r"of shape \(32,\) is not divided by .* \(2 axes for 1\); give a function"),
    ],
    ids=["text", "none", "rank"],
)
def test_shardings_that_are_none(checkpoint, sharding, message):
    with pytest.raises(ValueError, match=message):
        models.load(checkpoint, sharding=sharding())


SHARDED = """
import sys, jax, numpy as np, models
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",))
whole = models.load(sys.argv[1])[1]
for axis in range(4):
    spec = lambda path, shape: P(*[None] * axis, "x") if len(shape) > axis and shape[axis] % 2 == 0 else P()
    parts = models.load(sys.argv[1], sharding=lambda *a: NamedSharding(mesh, spec(*a)))[1]
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    weight = parts["layers_0"]["self_attn"]["qkv_proj"]["weight"]
    shape = tuple(n // 2 if i == axis else n for i, n in enumerate(weight.shape))
    assert {s.data.shape for s in weight.addressable_shards} == {shape}
try:
    models.load(sys.argv[1], sharding=NamedSharding(mesh, P("x")))
except ValueError as e:
    assert "embed_tokens of shape (61, 32) is not divided by" in str(e), e
else:
    raise SystemExit("61 rows on 2 devices")
"""


@pytest.mark.exhaustive
def test_every_device_receives_its_part(checkpoint):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SHARDED, checkpoint], env=env, check=True)


def pickled_alone(path):
    import torch

    tensors = load_file(path / "model.safetensors")
    torch.save({n: torch.tensor(x.astype(np.float32)) for n, x in tensors.items()}, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


@pytest.mark.exhaustive
def test_the_command_for_pickles_converts_them(checkpoint):
    pytest.importorskip("torch", reason="transformers reads pickles with torch")
    expected = models.load(checkpoint)[1]
    pickled_alone(checkpoint)
    with pytest.raises(ValueError, match=r"\['pytorch_model.bin'\] are pickles, which run code") as error:
        models.load(checkpoint)
    command = str(error.value).splitlines()[-1]
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True)
    assert_same(models.load(checkpoint)[1], expected)


READ = {
    *"""model.safetensors model.safetensors.index.json model-00001-of-00002.safetensors
model-00001-of-000002.safetensors""".split()
}
TOKENIZER = {
    *"""config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json
special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt chat_template.jinja""".split()
}
LEFT = """.gitattributes README.md LICENSE.txt consolidated.safetensors consolidated.00.pth params.json
pytorch_model.bin pytorch_model-00001-of-00002.bin pytorch_model.bin.index.json original/consolidated.00.pth
tf_model.h5 rust_model.ot
flax_model.msgpack onnx/model.onnx onnx/config.json onnx/model.safetensors model.fp16.safetensors training_args.bin
model.fp16-00001-of-00002.safetensors model-00001-of-00002.fp16.safetensors model.fp16.safetensors.index.json
model-00001-of-00002.bin original/tokenizer.model adapter_model.safetensors trainer_state.json coreml/x/model.mlmodel
modeling_gptj.py ggml-model-q4_0.gguf openvino/openvino_model.bin tokenizer.model.v3 tekken.json""".split()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """What downloads are asked for; a config is all that comes."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    shutil.copy(EMBEDDED / "config.json", folder)
    calls = []

    def snapshot_download(repo_id, *, revision, token, allow_patterns, ignore_patterns):
        any_of = lambda name, patterns: any(fnmatch.fnmatch(name, p) for p in patterns)
        names = [*READ, *TOKENIZER, *LEFT]
        taken = {n for n in names if any_of(n, allow_patterns) and not any_of(n, ignore_patterns)}
        calls.append((repo_id, revision, token, taken))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_download_takes_what_is_read(hub):
    for use, source, options in (
        (models.load, "owner/name", {"revision": "v1", "token": "hf_x"}),
        (models.load, "owner/name@refs/pr/1", {}),
        (models.load_tokenizer, "owner/name", {"revision": "v1", "token": "hf_x"}),
        (models.load_tokenizer, "llama-3.1-8B@abc123", {}),
        (models.fingerprint, "Zephyr-7B", {}),
    ):
        with pytest.raises(ValueError, match=r"downloaded has no (tokenizer.json|model.safetensors)"):
            use(source, **options)
    assert hub == [
        ("owner/name", "v1", "hf_x", READ | TOKENIZER),
        ("owner/name", "refs/pr/1", None, READ | TOKENIZER),
        ("owner/name", "v1", "hf_x", TOKENIZER),
        ("meta-llama/Llama-3.1-8B", "abc123", None, TOKENIZER),
        ("HuggingFaceH4/zephyr-7b-beta", "main", None, READ | TOKENIZER),
    ]


def test_a_repository_of_pickles_is_refused_with_what_converts_it(hub, monkeypatch):
    for source, what in (
        ("owner/name", "'owner/name').save_pretrained('name'"),
        ("gpt-j-6b@x", "'EleutherAI/gpt-j-6b', revision='x').save_pretrained('gpt-j-6b'"),
    ):
        with pytest.raises(ValueError, match=r"its repository has none: convert weights that you trust") as error:
            models.load(source)
        assert f"c.from_pretrained({what}, safe_serialization=True)" in str(error.value)

    def refuse(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"owner/name is not a local directory, and downloading .* failed: offline"):
        models.load("owner/name")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("owner/name@", {}, "owner/name@ is neither a directory nor a hub id"),
        ("@main", {}, "neither a directory nor a hub id"),
        ("a/b/c", {}, "neither a directory nor a hub id like 'owner/name', nor one of the presets"),
        ("./owner/name", {}, "neither a directory nor a hub id"),
        ("owner/na me", {}, "neither a directory nor a hub id"),
        ("owner/name@a", {"revision": "b"}, "owner/name@a names another revision than revision='b'; give one"),
        ("owner/name", {"revision": ""}, "revision='' is not the name of a branch"),
        ("owner/name", {"revision": 3}, "revision=3 is not the name of a branch"),
        (EMBEDDED, {"revision": "main"}, "is a directory, which has no revision 'main'; leave revision out"),
        ("llama-3.1-8", {}, r"llama-3.1-8 is neither .* no preset has that name; near ones are \['llama-3.1-8b'"),
        ("zzz", {}, r"no preset has that name; there are \['cerebras-gpt-6.7b'"),
    ],
    ids=str,
)
def test_sources_that_are_none(hub, source, options, message):
    for use in (models.load, models.load_tokenizer, models.fingerprint, models.read_config):
        with pytest.raises(ValueError, match=message):
            use(source, **options)
    assert not hub


def test_a_directory_comes_before_a_preset_of_its_name(hub, checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.parent)
    checkpoint.rename("qwen3-0.6b")
    assert models.load("qwen3-0.6b", dtype="auto")[0].config.num_layers == 3
    assert not hub


def test_a_template_takes_the_text_as_it_is():
    for name, preset in models.PRESETS.items():
        assert name == name.lower()
        assert preset.template.count("{prompt}") == 1
        assert "a {prompt} {0}" in preset.prompt("a {prompt} {0}")
    assert models.preset("Llama-2-7B-chat").prompt("Hi").endswith("<</SYS>>\n\nHi [/INST]")


def test_a_fingerprint_is_of_what_is_read(checkpoint):
    first = models.fingerprint(checkpoint)
    for unread in (
        "README.md",
        "trainer_state.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    ):
        (checkpoint / unread).write_text("{}")
    assert models.fingerprint(checkpoint) == first
    found = {first}
    for read in ("tokenizer.json", "chat_template.jinja", "config.json", "model.safetensors"):
        with (checkpoint / read).open("ab") as f:
            f.write(b" ")
        found.add(models.fingerprint(checkpoint))
    assert len(found) == 5


def test_the_main_job_takes_the_same_names(tmp_path, capsys):
    parsed = run.parse(["--config", "snapkv.py", "--model", "owner/name@v1", "--dtype", "auto"])[0].setup
    assert (parsed.source, parsed.dtype) == ("owner/name@v1", "auto")
    with pytest.raises(SystemExit):
        run.parse(["--config", "snapkv.py", "--dtype", "bf16"])
    assert "'bfloat16'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"no preset has that name; near ones are \['mpt-7b'"):
        run.main(["--config", "snapkv.py", "--model", "mtp-7b", "--output", str(tmp_path / "out")])


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_load_holds_the_parameters_once(tmp_path, dtype):
    """Also where the dtype is not the stored one: the copy that is read is a strip."""
    place = checkpoint_of(loading.random_model("bfloat16", 0.5), tmp_path)
    found = loading.measure("kvjax", place, dtype)
    assert found["size"] > 0.4e9
    assert 0.99 < found["peak"] / found["size"] < 1.15


def test_links_that_an_index_names_lead_out_of_the_directory_in_the_hubs_cache_alone(checkpoint, tmp_path, tiny):
    index, blob = checkpoint / "model.safetensors.index.json", tmp_path / "repo" / "blobs" / "abc"
    blob.parent.mkdir(parents=True)
    (checkpoint / "model.safetensors").rename(blob)
    (checkpoint / "w.safetensors").symlink_to(blob)
    index.write_text(json.dumps({"weight_map": {"x": "w.safetensors"}}))
    with pytest.raises(ValueError, match=r"index.json lists \['w.safetensors'\], outside of its directory; copy them"):
        models.load(checkpoint)
    snapshot = tmp_path / "repo" / "snapshots" / "v1"
    shutil.copytree(checkpoint, snapshot, symlinks=True)
    assert models.load(snapshot)[0].config == tiny[0].config


def test_a_tokenizers_own_code_does_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    path = shutil.copytree(EMBEDDED, tmp_path / "x")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(ValueError, match="x: its tokenizer is code of its own, which kvjax never runs"):
        models.load_tokenizer(path)
    assert not (tmp_path / "ran").exists()


WITHOUT_TORCH = """
import logging, sys
sys.modules["torch"] = None
from kvjax import models
from kvjax.models.embedded import EMBEDDED
models.load_tokenizer(EMBEDDED)
logging.getLogger("transformers").warning("another warning")
"""


@pytest.mark.exhaustive
def test_that_there_is_no_torch_is_not_said_and_all_else_is():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert done.stderr.removeprefix("[transformers] ") == "another warning\n"
