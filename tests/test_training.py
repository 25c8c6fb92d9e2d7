"""The varied model's training: documents, what is hidden from heads, and what is written."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from kvjax import models
from kvjax.experiments.training import embedded, loop, varied
from kvjax.experiments.training.documents import Documents, Sizes
from kvjax.experiments.training.loop import ANSWER, FIRST, LANGUAGE
from kvjax.models import LanguageModel, ModelConfig
from kvjax.models.embedded import VARIED
from kvjax.run.layers import without_cache

TEXT = "\n\n".join(f"The {n} speaks of gold and of winter, part {i}." for i in range(60) for n in ("king", "fool"))


@pytest.fixture(scope="module")
def fitted():
    return varied.fitted(TEXT)


@pytest.fixture(scope="module")
def documents(fitted):
    return Documents(lambda text: fitted.encode(text).ids, varied.BOS, TEXT)


@pytest.mark.parametrize("kind", varied.KINDS)
def test_an_answer_can_be_known_from_what_stands_before_it(documents, kind):
    """Its tokens were there, one after the other, and only what follows nothing is free."""
    rng, answered = np.random.default_rng(0), 0
    for length in (60, 300):
        for _ in range(20):
            tokens, classes = documents.draw(rng, length, kind, Sizes(filler=(0.1, 0.5)))
            assert tokens.shape == classes.shape == (length,)
            assert tokens[0] == varied.BOS
            answered += (classes >= ANSWER).any()
            for i in np.nonzero(classes == FIRST)[0]:
                end = i + 1
                while end < length and classes[end] == ANSWER and end < i + 3:
                    end += 1
                text, wanted = tokens[:i].tolist(), tokens[i:end].tolist()
                assert any(text[j : j + len(wanted)] == wanted for j in range(len(text)))
    assert answered == 0 if kind == "running" else answered > 20


def test_digits_are_tokens_and_any_text_comes_back(fitted):
    ids = fitted.encode(" the code for ada is 7 3 3").ids
    assert [fitted.decode([i]) for i in ids[-3:]] == [" 7", " 3", " 3"]
    text = "\n\nIt wasn't 1,024 — ¿qué? ```x = [1]```\n"
    assert fitted.decode(fitted.encode(text).ids) == text


def test_batches_depend_on_seed_and_step_alone(documents):
    stage = varied.Stage(1, 64, 3, (1, 1, 1, 1, 1), near=0.1, far=0.5, jumps=1.0)
    a, b, c = (varied.batch(documents, 0, step, stage) for step in (5, 5, 6))
    same = lambda x, y: jax.tree.map(lambda u, v: bool(jnp.array_equal(u, v)), x, y)
    assert jax.tree.all(same(a, b))
    assert not any(same(a, c)[:4])
    assert (np.diff(a[2], axis=1) >= 1).all()
    assert a[2].max() < varied.LONGEST
    assert LANGUAGE in a[1]


def hidden(near=0.0, far=(0.0, 0.0), in_all_heads=(False, False), first=4096):
    return jnp.float32(near), jnp.asarray(far), jnp.asarray(in_all_heads), jnp.int32(first)


def test_what_heads_do_not_see():
    """The token before, a share of those far back, in one head or in all, and most in layer 0."""
    T, K, local = 400, 4, varied.LOCAL
    pos = jnp.broadcast_to(jnp.arange(T), (2, T))
    attend = varied.Hiding(pos, jax.random.key(0), hidden(0.25, (0.3, 0.3), (False, True), first=30))
    zero, one = (np.asarray(attend.seen(layer, K)) for layer in (0, 1))
    back = np.arange(T)[:, None] - np.arange(T)
    assert not (zero & ((back < 0) | (back >= 30))).any()
    assert one[:, :, (back == 0) | ((back > 1) & (back <= local))].all()
    assert 0.7 < one[:, :, back == 1].mean() < 0.8
    gone = [~one[b].any(1, where=back > local) for b in (0, 1)]  # slots that no later token far ahead sees
    far = slice(0, T - local - 1)
    assert 0.25 < gone[0][:, far].mean() < 0.35
    assert not (gone[0][0] == gone[0][1])[far].all()
    assert 0.05 < gone[1][:, far].mean() < 0.15
    assert (gone[1] == gone[1][0]).all()


@pytest.mark.slow
def test_nothing_hidden_is_plain_attention():
    config = ModelConfig(31, 16, 16, 2, 4, 2, 8, qkv_bias=True)
    model, tokens = LanguageModel(config), jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 20)))
    params = loop.initialised(model.shapes, jax.random.key(1), embedding_std=0.1, bias_std=1.0)
    pos = jnp.cumsum(jnp.ones((2, 20), jnp.int32), axis=1)
    logits = [
        model(params, tokens, attend=attend)
        for attend in (varied.Hiding(pos, jax.random.key(0), hidden()), without_cache(pos))
    ]
    np.testing.assert_allclose(*logits, atol=1e-5, rtol=1e-5)


def test_the_checkpoint_is_what_training_describes():
    """And its text is cut as in training."""
    (model, params), tokenizer = models.load(VARIED), models.load_tokenizer(VARIED)
    assert dataclasses.replace(varied.CONFIG, out_bias=True, dtype=model.config.dtype) == model.config
    assert 5e6 < sum(f.stat().st_size for f in VARIED.iterdir()) < 10e6
    assert models.num_params(params) == 2_888_960
    stored = tokenizers.Tokenizer.from_file(str(VARIED / "tokenizer.json"))
    text = " the code for ada is 7 3 3 .\n\nKING: It isn't 1,024."
    assert tokenizer(text, add_special_tokens=False).input_ids == stored.encode(text).ids


@pytest.mark.exhaustive
def test_it_trains(tmp_path, monkeypatch):
    """What is written can be loaded, text included; another text is another run."""
    small = dataclasses.replace(varied.CONFIG, embed_dim=16, mlp_dim=16, num_layers=2, head_dim=8)
    monkeypatch.setattr(varied, "CONFIG", small)
    monkeypatch.setattr(varied, "CURRICULUM", (varied.Stage(4, 24, 2, (1, 1, 1, 1, 1)),))
    file = tmp_path / "text"
    file.write_text(TEXT)

    def run():
        with jax.numpy_dtype_promotion("standard"):  # optax promotes
            varied.train(file, loop.Options(tmp_path / "c", tmp_path / "model"))

    run()
    model, _ = models.load(tmp_path / "model")
    assert model.config.qkv_bias
    assert model.config.out_bias
    loaded = models.load_tokenizer(tmp_path / "model")
    assert loaded.decode(loaded("what is 4 2 ?", add_special_tokens=False).input_ids) == "what is 4 2 ?"
    file.write_text(TEXT + TEXT)
    with pytest.raises(ValueError, match=r"holds a checkpoint of .*, not of "):
        run()
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="no text in UTF-8"):
        run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_every": 0}, "save_every=0 must be at least 1"),
        ({"seed": 2**31}, "seed=2147483648 must be at most 2147483647"),
        ({"checkpoints": pathlib.Path(__file__)}, "is a file, not a directory"),
    ],
)
def test_training_refuses_what_it_cannot_do_before_it_starts(options, message):
    with pytest.raises(ValueError, match=message):
        embedded.train(dataclasses.replace(embedded.HOW, **options))
