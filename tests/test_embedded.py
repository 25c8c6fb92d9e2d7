"""The models in the repository, their tasks, and the embedded one's training."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import methods, models
from kvjax.experiments import corpus
from kvjax.experiments.core.engine import Engine, prompts_of, shapes
from kvjax.experiments.tasks import RETRIEVAL, TASKS, Task
from kvjax.experiments.training import embedded as training
from kvjax.experiments.training.loop import FIRST, Options
from kvjax.models.embedded import EMBEDDED, INCLUDED
from kvjax.models.tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def task(embedded):
    _, _, tokenizer = embedded
    return Task(lambda text: tokenizer(text, add_special_tokens=False).input_ids, (tokenizer.bos_token_id,), 1024, 0)


def test_the_checkpoint_is_what_training_describes(embedded):
    model, params, tokenizer = embedded
    assert dataclasses.replace(training.CONFIG, dtype=model.config.dtype) == model.config
    assert sum(f.stat().st_size for f in EMBEDDED.iterdir()) < 8e6
    assert models.num_params(params) == 837_376
    assert [tokenizer.convert_tokens_to_ids(w) for w in corpus.VOCABULARY] == list(range(len(corpus.VOCABULARY)))
    assert tokenizer.decode(tokenizer("the code for ada is 7 3", add_special_tokens=False).input_ids) == (
        "the code for ada is 7 3"
    )


@pytest.mark.parametrize("path", INCLUDED.values(), ids=INCLUDED)
def test_a_tokenizer_is_stored_as_it_is_written_now(path, tmp_path):
    """Under a class's name that transformers 4 has, too."""
    tokenizer = models.load_tokenizer(path)
    special = {k: getattr(tokenizer, k) for k in ("pad_token", "bos_token", "eos_token", "unk_token")}
    save_tokenizer(tmp_path, tokenizer.backend_tokenizer, special=special)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((path / name).read_text())
    assert json.loads((path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize("name", [*RETRIEVAL, "perplexity"])
def test_examples(task, embedded, name):
    """Reproducible, of the right length, and answerable from their own text."""
    tokenizer = embedded[2]
    for index in (0, 9, 31):
        e = TASKS[name](task, index)
        assert e == TASKS[name](task, index)
        assert e != TASKS[name](task, index + 1)
        (q,) = e.questions
        total = len(e.context) + len(q.ids) + len(q.continuation)
        assert total <= dict(e.meta)["length"] + len(q.continuation)
        assert total > dict(e.meta)["length"] - 20
        text, asked = tokenizer.decode(e.context), tokenizer.decode(q.ids)
        assert corpus.UNK not in text + asked
        for reference in q.references:
            assert " ".join(w for w in reference.split() if w in corpus.DIGITS) in text
            assert all(w in asked for w in reference.split() if w in corpus.NAMES)
        if q.references:
            at, count = (int(dict(e.meta)[name]) for name in ("needle_at", "needle_tokens"))
            assert q.references[0] in tokenizer.decode(e.context[at : at + count])


@pytest.mark.parametrize("count", [4, 8, 24, 32, 48])
def test_any_number_of_needles_covers_lengths_and_depths_evenly(task, count):
    metas = [dict(TASKS["single_needle"](task, i).meta) for i in range(count)]
    for name, grid in (("length", {410, 614, 819, 1024}), ("depth", {round(d / 7, 4) for d in range(8)})):
        counts = [sum(m[name] == value for m in metas) for value in grid]
        assert sum(counts) == count
        assert max(counts) - min(counts) <= 1
    assert len({(m["length"], m["depth"]) for m in metas}) == min(count, 32)


@pytest.mark.parametrize("name", ["several_needles", "multi_query", "key_value"])
def test_facts_at_random_places_reach_the_whole_of_a_prompt_of_full_length(task, name):
    metas = [dict(TASKS[name](task, i).meta) for i in range(24)]
    assert {m["length"] for m in metas} == {1024}
    assert all(any(low <= m["depth"] < low + 0.25 for m in metas) for low in (0, 0.25, 0.5, 0.75))


def test_splits_share_no_sentence():
    assert not set(corpus.sentence_bank("train")) & set(corpus.sentence_bank("held_out"))


def exact_match(name, policy, length, per_task):
    (model, params), tokenizer = models.load(INCLUDED[name]), models.load_tokenizer(INCLUDED[name])
    task = Task(lambda text: tokenizer(text, add_special_tokens=False).input_ids, (tokenizer.bos_token_id,), length, 0)
    examples = [TASKS[name](task, i + 40) for name in RETRIEVAL for i in range(per_task)]
    scores = {name: [] for name in RETRIEVAL}
    for shape in shapes(prompt for e in examples for prompt in prompts_of(e, "in_prompt")):
        engine = Engine(model, params, policy, shape, batch_size=per_task, tokenizer=tokenizer)
        engine.compile()
        for i in range(0, len(shape.prompts), per_task):
            batch = shape.prompts[i : i + per_task]
            for prompt, (line,) in zip(batch, engine.run(batch)[0], strict=True):
                scores[prompt.example.task].append(line["score"])
    return {name: np.mean(found) for name, found in scores.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "length", "per_task", "least", "average"),
    [
        ("embedded", 384, 8, 0.9, 0.95),
        pytest.param("embedded", 1024, 100, 0.95, 0.95, marks=pytest.mark.exhaustive),
        pytest.param("varied", 1024, 32, 0.7, 0.85, marks=pytest.mark.exhaustive),
    ],
    ids=["short", "full_length", "varied"],
)
def test_it_retrieves_with_the_full_cache_and_fails_without(name, length, per_task, least, average):
    full = exact_match(name, methods.full(), length, per_task)
    assert min(full.values()) >= least
    assert np.mean(list(full.values())) >= average
    window = exact_match(name, methods.window(0.1), length, per_task)
    assert max(window.values()) <= 0.2


# --- training ---


def test_documents_mark_what_can_be_known():
    rng = np.random.default_rng(0)
    for stage in training.CURRICULUM:
        tokens, classes = training.document(rng, stage)
        assert tokens.shape == classes.shape == (stage.length + 1,)
        words = [corpus.VOCABULARY[t] for t in tokens]
        firsts = np.nonzero(classes == FIRST)[0]
        assert len(firsts)
        for i in firsts:
            assert words[i] in corpus.DIGITS
            assert words[i] in words[:i]  # an answer was stated before


def test_batches_depend_on_seed_and_step_alone():
    stage = training.CURRICULUM[3]
    a, b, c = (training.batch(0, step, stage) for step in (5, 5, 6))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(a[0], c[0])
    assert (np.diff(a[2], axis=1) >= 1).all()
    assert a[2].max() < training.CONFIG.max_position


def test_the_structured_start_looks_one_token_back():
    params = training.initial_params(jax.random.key(4))
    model = models.LanguageModel(training.CONFIG)
    rows = []

    def attend(cache, q, k, v, *, layer, rotate, **_):
        pos = jnp.arange(q.shape[2], dtype=jnp.int32)[None, None]
        if layer == 0:
            logits = jnp.einsum("bnth,bnsh->bnts", rotate(q, pos), jnp.repeat(rotate(k, pos), 2, axis=1))
            rows.append(jnp.tril(jnp.exp(logits * 32**-0.5))[0, :4, 20])
        return q, cache, ()

    tokens = jnp.asarray(np.random.default_rng(0).integers(4, 300, (1, 40)), jnp.int32)
    model(params, tokens, attend=attend)
    assert (np.asarray(rows[0]).argmax(-1) == 19).all()


@pytest.mark.slow
def test_what_training_writes_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CONFIG", dataclasses.replace(training.CONFIG, num_layers=2))
    monkeypatch.setattr(training, "CURRICULUM", (training.Stage(4, 24, 2), training.Stage(3, 32, 2)))
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        training.train(Options(tmp_path / "checkpoints", tmp_path / "model"))
    assert models.load(tmp_path / "model")[0].config.num_layers == 2
    assert models.load_tokenizer(tmp_path / "model").decode([corpus.WORD_ID["ada"]]) == "ada"


@pytest.mark.parametrize("name", ["varied", "reasoner"])
def test_a_model_is_named_where_a_wheel_has_none(name, monkeypatch, tmp_path):
    monkeypatch.setitem(INCLUDED, name, tmp_path / "none")
    with pytest.raises(ValueError, match=rf"not with the wheel; run this in a clone, or make it, .* train {name}"):
        models.load(name)


def test_models_of_the_project_are_loaded_by_name_unless_a_directory_has_it(monkeypatch, tmp_path):
    assert models.load("embedded")[0] == models.load(EMBEDDED)[0]
    assert models.fingerprint("embedded") == models.fingerprint(EMBEDDED)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "embedded").mkdir()
    with pytest.raises(ValueError, match=r"config\.json"):
        models.load("embedded")
