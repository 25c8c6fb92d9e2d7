"""kvjax as a model of lm-eval: the answers of lm-eval's own adapter with the full cache, and policies beside it.

Most tests need the extra "eval", which the test environment has not.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.experiments.harness import longbench
from kvjax.experiments.harness.options import sampler_of
from kvjax.experiments.harness.scoring import rounded_up
from tests.stories import write_stories


def test_without_lm_eval_the_extra_is_named(monkeypatch, tmp_path):
    (tmp_path / "trec.json").write_text("[]")
    for name in [name for name in sys.modules if name.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"lm-eval cannot be imported .* pip install 'kvjax\[eval\]'"):
        longbench.write_tasks(tmp_path, tmp_path / "tasks")


@pytest.fixture(scope="module")
def harness():
    """The module of the model, which is registered when it is imported."""
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    from kvjax.experiments.harness import language_model

    return language_model


@pytest.fixture(scope="module")
def stories(shared_data, tmp_path_factory):
    return write_stories(shared_data / "stories260k", tmp_path_factory.mktemp("stories"))


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "snapk"}, "no config 'snapk' .did you mean snapkv..; there are ada_pyramid, "),
        (
            {"policy": "snapkv", "budget": 0.5, "window_size": 4},
            "policy=snapkv has no window_size; its parameters are budget, wind",
        ),
        ({"policy": "snapkv"}, "policy=snapkv needs budget=, a number of tokens such as 64 or a share such as 0.2"),
        (
            {"policy": "snapkv", "budget": 8, "window": 16},
            "a budget of 8 tokens cannot hold 0 sinks and 16 recent tokens",
        ),
        ({"policy": "think"}, r"stands for 3 policies \(channels-0.25, .*\); give one value of channels"),
        ({"truncation": "right"}, "truncation='right' is not one of"),
        ({"batch_size": "auto"}, "batch_size='auto'.* is not supported"),
    ],
)
def test_options_that_do_not_fit_are_named(harness, options, message):
    with pytest.raises(ValueError, match=message):
        harness.HarnessModel(**options)


def test_options_of_generation_are_those_of_transformers():
    assert sampler_of({"do_sample": False, "temperature": 0.0, "num_beams": 1}) == kvjax.Greedy()
    assert sampler_of({"do_sample": True, "temperature": 0.5, "top_k": 0}) == kvjax.Sample(temperature=0.5)
    with pytest.raises(ValueError, match="generation has no num_beams here; there are until, max_gen_toks, do_sample"):
        sampler_of({"do_sample": False, "num_beams": 4})


def test_numbers_of_steps_are_few_and_hardly_larger():
    sizes = [rounded_up(n) for n in range(1, 1025)]
    assert all(n <= size <= max(1.5 * n, 1) for n, size in enumerate(sizes, 1))
    assert sorted(set(sizes))[:7] == [1, 2, 3, 4, 6, 8, 12]
    assert len(set(sizes)) == 20


@pytest.fixture(scope="module")
def scored(harness, stories):
    """Contexts and continuations, one longer than the model's context and one empty, and their log-likelihoods."""
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog. "
    pairs = (text, "One day"), (text, "He ran"), (text * 3, "One day"), ("", "Once upon")
    asked = requests("loglikelihood", *pairs)
    return asked, harness.HarnessModel(str(stories), batch_size=2, max_length=64).loglikelihood(asked)


@pytest.mark.slow
def test_likelihoods_of_the_full_cache_are_the_models_own(scored, stories):
    asked, found = scored
    model, params = models.load(stories)
    tokenizer = models.load_tokenizer(stories)
    for request, (logp, greedy) in zip(asked, found, strict=True):
        context, continuation = request.args
        ids = models.encode(tokenizer, context + continuation)
        m = len(ids) - len(models.encode(tokenizer, context.rstrip(" ")))
        ids = np.array(ids[-65:])  # one more than are read
        prompt, rest = ids[None, :1], ids[None, 1:-1]
        first, state = kvjax.prefill(model, params, prompt, max_new_tokens=rest.shape[1])
        logits = jnp.concatenate([first[:, None], kvjax.feed(model, params, rest, state)[0]], axis=1)
        rows = jax.nn.log_softmax(logits[0])[-m:]
        np.testing.assert_allclose(logp, rows[jnp.arange(m), ids[-m:]].sum(), rtol=1e-5)
        assert greedy == bool((rows.argmax(-1) == ids[-m:]).all())


@pytest.mark.slow
def test_likelihoods_after_an_eviction_do_not_depend_on_the_batch(harness, stories, scored):
    asked, full = scored[0][:2], [logp for logp, _ in scored[1][:2]]
    made = lambda **options: harness.HarnessModel(str(stories), max_length=64, policy="h2o", **options)
    run = lambda **options: [logp for logp, _ in made(**options).loglikelihood(asked)]
    together = run(budget=16, batch_size=2)
    np.testing.assert_allclose(together, run(budget=16, batch_size=1), rtol=1e-5)
    assert np.abs(np.subtract(together, full)).max() > 1e-2, "half of the context is left"
    np.testing.assert_allclose(run(budget=64, batch_size=2), full, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "step", "more"),
    [
        ("generate_until", "_generated", ({"until": ["."], "max_gen_toks": 8},)),
        ("loglikelihood_rolling", "_scored", ()),
    ],
)
def test_an_interrupted_run_goes_on_where_it_stopped(harness, stories, tmp_path, monkeypatch, kind, step, more):
    from lm_eval.api.model import CachingLM

    texts = [f"Once upon a time, there was a {who}" for who in ("dog", "cat", "bug")]
    asked = requests(kind, *((text, *more) for text in texts))
    made = lambda **more: harness.HarnessModel(str(stories), policy="random", budget=8, max_length=64, **more)
    whole = getattr(made(), kind)(asked)

    run = getattr(harness.HarnessModel, step)
    batches = []

    def counted(self, batch):
        batches.append(batch)
        if len(batches) == 2:
            raise KeyboardInterrupt
        return run(self, batch)

    monkeypatch.setattr(harness.HarnessModel, step, counted)
    responses = str(tmp_path / "responses.db")
    with pytest.raises(KeyboardInterrupt):
        getattr(CachingLM(made(), responses), kind)(asked)
    assert getattr(CachingLM(made(), responses), kind)(asked) == whole
    assert len(batches) == len(asked) + 1, "only what was interrupted is done again"
    with pytest.raises(ValueError, match=r"holds responses of .* give another --use_cache"):
        CachingLM(made(seed=1), responses)


@pytest.mark.slow
def test_an_answer_ends_before_the_first_stop_string(harness, stories):
    model = harness.HarnessModel(str(stories))
    prompt = "Once upon a time, there was a"
    options = [{"until": until, "max_gen_toks": 24} for until in ([], ["loved", ".", "Lily"])]
    whole, cut = model.generate_until(requests("generate_until", *((prompt, each) for each in options)))
    assert "." in whole
    assert cut == min((whole.split(stop)[0] for stop in ("loved", ".", "Lily")), key=len)


@pytest.mark.slow
def test_a_text_is_scored_in_windows(harness, stories):
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside. " * 2
    (found,) = harness.HarnessModel(str(stories), max_length=16).loglikelihood_rolling(
        requests("loglikelihood_rolling", (text,))
    )
    whole = harness.HarnessModel(str(stories))
    ids = models.encode(whole.tokenizer, text)
    cut = [ids[i : i + 16] for i in range(0, len(ids), 16)]
    assert len(cut) > 2
    first = [*[1], *ids]
    parts = [(None, list(first[i * 16 : i * 16 + 1]), part) for i, part in enumerate(cut[:-1])]
    end = len(cut[-1])  # the last window has as many tokens as the others, of which those before are its context
    parts.append((None, first[-17 : len(first) - end], cut[-1]))
    np.testing.assert_allclose(found, sum(logp for logp, _ in whole._loglikelihood_tokens(parts)), rtol=1e-5)
    with pytest.raises(ValueError, match=r"budget=0\.5 is a share of the prompt, which is one token where whole texts"):
        harness.HarnessModel(str(stories), policy="h2o", budget=0.5).loglikelihood_rolling([])


@pytest.mark.parametrize(("truncation", "kept"), [("left", (6, 7, 8, 9)), ("middle", (0, 1, 8, 9))])
def test_what_a_prompt_that_is_too_long_lacks(harness, truncation, kept):
    model = harness.HarnessModel(truncation=truncation)
    assert model._shortened(range(4), 4) == (0, 1, 2, 3)
    assert model._shortened(range(10), 4) == kept
    assert model.get_model_info()["kvjax"]["cut"] == 1


def test_a_chat_begins_with_one_bos(harness, stories):
    model = harness.HarnessModel(str(stories), policy="snapkv", budget=0.5)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with pytest.raises(ValueError, match="no chat template; leave --apply_chat_template out"):
        model.apply_chat_template(messages)
    model.tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    text = model.apply_chat_template(messages)
    assert text == "<s>user: Hi\nassistant:"
    assert model.tok_encode(text).count(model.prefix_token_id) == 1
    assert model.chat_template(True) == model.tokenizer.chat_template


def test_rows_that_are_none_are_named(harness, tmp_path):
    for rows, message in (
        ("{", "trec.json, row 1: no JSON"),
        ("[]", "trec.json has no rows"),
        ('[{"origin_prompt": "a"}]', "trec.json, row 1: answers must be a list of at least one text, not None"),
        ('[{"answers": ["a"], "context": "b"}]', "trec.json, row 1: input must be a text, not None"),
    ):
        (tmp_path / "trec.json").write_text(rows)
        with pytest.raises(ValueError, match=message):
            longbench.write_tasks(tmp_path, tmp_path / "tasks")
    with pytest.raises(ValueError, match="has none of 2wikimqa, dureader, "):
        longbench.write_tasks(tmp_path / "tasks", tmp_path)


@pytest.fixture(scope="module")
def local_tasks(harness, shared_data, tmp_path_factory):
    """The names of LongBench's tasks over local rows, and what lm-eval finds them with."""
    from lm_eval.tasks import TaskManager

    output = tmp_path_factory.mktemp("tasks")
    names = longbench.write_tasks(shared_data / "longbench_mini", output)
    return names, TaskManager(include_path=str(output), include_defaults=False)


def run_tasks(local_tasks, model, **options):
    """Text and score of the first row of every task, by task and row."""
    import lm_eval

    names, manager = local_tasks
    options |= {"tasks": names, "limit": 1, "gen_kwargs": {"max_gen_toks": 8}, "bootstrap_iters": 0}
    found = lm_eval.simple_evaluate(model=model, task_manager=manager, log_samples=True, **options)
    return {
        (task, row["doc_id"]): (row["resps"][0][0], row["score"])
        for task, rows in found["samples"].items()
        for row in rows
    }


# What lm-eval and the packages that it scores with warn of is no concern of these tests.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_longbench_gives_what_lm_evals_adapter_gives(local_tasks, stories):
    pytest.importorskip("peft", reason="lm-eval's adapter for transformers needs torch, accelerate and peft")
    options = {"pretrained": str(stories), "max_length": 128}
    ours = run_tasks(local_tasks, "kvjax", model_args=options, batch_size=8)
    theirs = run_tasks(local_tasks, "hf", model_args={**options, "dtype": "float32"}, batch_size=1, device="cpu")
    assert len({task for task, _ in ours}) == 21
    assert ours == theirs
