"""Budget curves from one reading, against one run at a time."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import kvjax
from kvjax import analysis, methods
from kvjax.analysis import grid
from kvjax.drivers.attention import without_cache
from kvjax.experiments.tasks import TASKS, Task
from tests import helpers
from tests.test_analysis import plain_layer_loss

pytestmark = pytest.mark.slow  # minutes of compilation

B, T, F = 3, 24, 6
LENGTHS = np.array([24, 24, 17])
BUDGETS = (6, 10, 0.5, 40)

one_call = sys.modules["kvjax.analysis.curves"]


def snapkv(budget, **options):
    return methods.snapkv(budget, window_size=4, kernel_size=3, **options)


FAMILIES = {
    "window": methods.window,
    "streaming_llm": lambda b: methods.streaming_llm(b, sinks=2),
    "h2o": methods.h2o,
    "tova": methods.tova,
    "snapkv": snapkv,
    "pyramidkv": lambda b: methods.pyramidkv(b, beta=3, window_size=4, kernel_size=3),
    "ada_snapkv": lambda b: methods.ada_snapkv(b, window_size=4, kernel_size=3),
    "ada_normalized": lambda b: methods.ada_snapkv(b, window_size=4, kernel_size=3, normalize=True),
    "roco": lambda b: methods.roco(b, protect_last=2),
    "criticalkv": lambda b: methods.criticalkv(b, base=snapkv(b)),
    "per query head": lambda b: snapkv(b, granularity="query_head"),
    "rerotated": lambda b: dataclasses.replace(methods.h2o(b), positions="rerotate"),
    # Those below have budgets in their scores or selections, or are compositions, or draw random numbers.
    "chunkkv": lambda b: methods.chunkkv(b, base=snapkv(b), chunk_size=4),
    "ahakv": lambda b: methods.ahakv(b, recent=3, pool_kernel=3),
    "chain": lambda b: kvjax.chain(snapkv(b), methods.tova(b)),
    "shared": lambda b: kvjax.shared_layers(methods.h2o(b)),
    "full": lambda b: kvjax.identity(),
    "random": methods.random,
    "nacl": lambda b: methods.nacl(b, protect=2, proxies=5, random=3),
    "nacl table 4": methods.nacl,
    "keyformer": lambda b: methods.keyformer(b, recent=3),
}
UNROLLED = {"chunkkv", "ahakv", "chain", "shared", "full", "nacl table 4"}
DRAWING = {"random", "nacl", "nacl table 4", "keyformer"}


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return rng.integers(0, 61, (B, T)), rng.integers(0, 61, (B, F)), jax.random.split(jax.random.key(3), B)


@pytest.fixture(scope="module")
def tensors(tiny, prompts):
    """Queries, keys and values of every layer over the prompts, as the model has them before rotation."""
    model, params = tiny
    found = []
    pos = jnp.asarray(np.maximum(np.arange(T) - (T - LENGTHS)[:, None], -1), jnp.int32)
    plain = without_cache(pos)

    def attend(cache, q, k, v, **options):
        found.append((q, k, v, options["rotate"], options["out_proj"]))
        return plain(cache, q, k, v, **options)

    tokens = jnp.where(pos >= 0, jnp.asarray(prompts[0], jnp.int32), 0)
    model(params, tokens, (None,) * model.config.num_layers, attend=attend, last_only=True)
    return found


def plans(tiny, name, budgets=BUDGETS):
    model, _ = tiny
    return [
        kvjax.make_plan(model.config, FAMILIES[name](b), prompt_len=T, max_new_tokens=F, lengths=LENGTHS)
        for b in budgets
    ]


def reading(tiny, prompts, plans, seeds=1):
    model, params = tiny
    tokens, continuation, keys = prompts
    return analysis.read(
        model,
        params,
        tokens,
        continuation,
        lengths=LENGTHS,
        key=keys,
        seeds=seeds,
        measure=analysis.measurements(plans),
    )


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "shared"])
def test_masks_are_those_of_every_policy_alone(tiny, prompts, tensors, name):
    """Of `evict_layer` for every budget, seed and layer."""
    planned = plans(tiny, name)
    read = reading(tiny, prompts, planned, seeds=2)
    assert grid.stackable([p.policy for p in planned]) == (name not in UNROLLED)
    found = np.asarray(jax.jit(lambda r: grid.keep_all(planned, r))(read))
    assert found.shape[1] == (2 if name in DRAWING else 1)
    for layer, (q, k, v, rotate, out_proj) in enumerate(tensors):
        options = {"lengths": LENGTHS, "rotate": rotate, "out_proj": out_proj, "layer": layer, "num_layers": 3}
        one = lambda policy, q, k, v, key, o=options: kvjax.evict_layer(policy, q, k, v, key=key, **o).keep
        alone = jax.jit(lambda *args, one=one: [one(plan.policy, *args) for plan in planned])
        for seed in range(found.shape[1]):
            for m, keep in enumerate(alone(q, k, v, read.keys[seed])):
                np.testing.assert_array_equal(found[m, seed, layer], keep, err_msg=f"{name} {BUDGETS[m]} {layer}")


@pytest.mark.parametrize("name", ["ada_snapkv", "streaming_llm", "shared", "per query head", "keyformer"])
def test_masks_and_logits_are_those_of_prefill_and_feed(tiny, prompts, name):
    """The run that a curve stands for: a compacted cache, decoded token by token."""
    model, params = tiny
    tokens, continuation, keys = prompts
    policy = kvjax.when(kvjax.after_prefill(), FAMILIES[name](10))
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=F, lengths=LENGTHS)

    @jax.jit
    def alone(params, tokens, continuation):
        _, state = kvjax.prefill(model, params, tokens, plan, lengths=LENGTHS, key=keys)
        return state, kvjax.feed(model, params, continuation, state)[0]

    state, logits = alone(params, jnp.asarray(tokens), jnp.asarray(continuation))
    read = reading(tiny, prompts, [plan])
    keep = analysis.keep_one(plan, read)
    for layer, kv in enumerate(state.layers):
        wanted = helpers.live_positions(kv)
        pos = np.asarray(read.layers[layer].cache(grid.kind_of(plan).granularity).pos)
        mask = np.asarray(keep[layer])
        assert [[sorted(p[m]) for p, m in zip(*rows, strict=True)] for rows in zip(pos, mask, strict=True)] == wanted
    found = jax.jit(lambda r: r.logits_after(model, params, keep, grid.kind_of(plan).positions))(read)
    np.testing.assert_allclose(found, logits, rtol=2e-4, atol=2e-4)


def test_losses_of_a_mask_are_those_of_plain_loops(tiny, prompts):
    model, params = tiny
    plan = plans(tiny, "ada_snapkv")[1]
    read = reading(tiny, prompts, [plan])
    keep = analysis.keep_one(plan, read)
    found = jax.jit(lambda r: analysis.mask_losses(model, params, r, keep))(read)
    for i, layer in enumerate(read.layers):
        turn = lambda x: model.config.rope(x, read.rows[:, None])
        q, k = turn(layer.q), jnp.concatenate([layer.prompt.k, turn(layer.k)], axis=2)
        v = jnp.concatenate([layer.prompt.v, layer.v], axis=2)
        mask = np.concatenate([np.asarray(keep[i]), np.ones((B, 2, F), bool)], axis=2)
        wanted = plain_layer_loss(q, k, v, mask, layer.out_proj, lengths=LENGTHS + F)
        close = lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-4, atol=1e-4)
        close(found.l1, wanted["output"][1].mean(-1))
        close(found.l2, wanted["output"][2].mean(-1))
        close(found.heads_l1, wanted["heads"][1].mean(-1))
        close(found.heads_l2, wanted["heads"][2].mean(-1))
        close(found.bound, wanted["output_bound"][1].mean(-1))
        close(found.lost, wanted["lost"].mean((1, 2)))
        close(found.live, mask[..., :T].sum(-1).mean(-1))
    np.testing.assert_array_less(found.l1, found.bound)
    np.testing.assert_array_less(found.least_bound, found.bound * (1 + 1e-5))
    full = np.asarray(read.logits, np.float64)
    logits = np.asarray(read.logits_after(model, params, keep), np.float64)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (full, logits))
    np.testing.assert_allclose(found.kl, (p * np.log(p / q)).sum(-1).mean(-1), rtol=1e-4)
    np.testing.assert_allclose(found.agreement, (full.argmax(-1) == logits.argmax(-1)).mean(-1), rtol=1e-6)


SOME = ("window", "streaming_llm", "random", "ada_snapkv", "per query head", "full")


@pytest.fixture(scope="module")
def curves(tiny, prompts):
    model, params = tiny
    tokens, continuation, keys = prompts
    return analysis.curves(
        model, params, tokens, continuation, {n: FAMILIES[n] for n in SOME}, BUDGETS, lengths=LENGTHS, key=keys,
        seeds=2, oracles=("head", "layer", "model"), at_once=4,
    )  # fmt: skip


def test_curves_are_single_runs(tiny, prompts, curves):
    """Of one policy at one budget and one seed, without an oracle, one mask at a time."""
    model, params = tiny
    tokens, continuation, keys = prompts
    for name in ("random", "ada_snapkv", "streaming_llm", "per query head"):
        for m in (0, 2):
            read = analysis.read(model, params, tokens, continuation, lengths=LENGTHS, key=keys, seeds=2)
            one = {"policies": {name: FAMILIES[name]}, "budgets": [BUDGETS[m]], "lengths": LENGTHS, "oracles": ()}
            keys_of = read.keys if name in DRAWING else read.keys[:1]
            runs = [analysis.curves(model, params, tokens, continuation, key=key, **one) for key in keys_of]
            for field in dataclasses.fields(analysis.Losses):
                wanted = np.mean([np.asarray(getattr(r.losses, field.name))[0, 0] for r in runs], axis=0)
                found = np.asarray(getattr(curves.losses, field.name))[SOME.index(name), m]
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=f"{name} {field.name}")


def test_nothing_is_lost_by_a_budget_that_holds_everything(curves):
    for loss, value in (("l1", 0.0), ("lost", 0.0), ("regret_layers", 0.0), ("kl", 0.0), ("agreement", 1.0)):
        np.testing.assert_allclose(curves.values(loss)[:, -1], value, atol=1e-4)
        np.testing.assert_allclose(curves.values(loss)[SOME.index("full")], value, atol=1e-4)


def test_hindsight_is_never_beaten(curves):
    lost, live = np.asarray(curves.losses.lost), np.asarray(curves.losses.live)
    P = SOME.index("per query head")  # it and the full cache keep more than the oracles
    heads, layers, model = lost[len(SOME) :]
    assert (heads <= lost[: SOME.index("ada_snapkv")] + 1e-6).all()
    assert (layers <= lost[:P] + 1e-6).all()
    assert (model.mean(1) <= lost[:P].mean(2) + 1e-6).all()
    assert (model.mean(1) <= layers.mean(1) + 1e-6).all()
    np.testing.assert_allclose(live[:P].mean(2), np.broadcast_to(live[-1].mean(1), live[:P].mean(2).shape), rtol=1e-6)
    for loss in ("regret_tokens", "regret_heads", "regret_layers"):
        assert (curves.values(loss) >= 0).all()
    np.testing.assert_allclose(
        curves.values("regret_layers")[:P], (lost[:P].mean(2) - model.mean(1)), atol=1e-5
    )  # fmt: skip


def test_bounds_hold_where_the_theorem_does(curves):
    losses = curves.losses
    moved = SOME.index("streaming_llm")
    assert np.isnan(losses.bound[moved]).all()
    others = [i for i in range(len(curves.policies)) if i != moved]
    for array in (losses.l1, losses.least_bound):
        assert (np.asarray(array)[others] <= np.asarray(losses.bound)[others] * (1 + 1e-5) + 1e-4).all()


def test_policies_have_names_of_their_own(tiny, prompts):
    tokens, continuation, _ = prompts
    with pytest.raises(ValueError, match=r"'hindsight \(model\)' is the name of an oracle"):
        analysis.curves(*tiny, tokens, continuation, {"hindsight (model)": methods.window}, [8], lengths=LENGTHS)


def test_an_equal_call_compiles_nothing_and_means_have_intervals(tiny, prompts, curves):
    model, params = tiny
    tokens, continuation, keys = prompts
    call = lambda: analysis.curves(
        model, params, tokens, continuation, {n: FAMILIES[n] for n in SOME}, BUDGETS, lengths=LENGTHS, key=keys,
        seeds=2, oracles=("head", "layer", "model"), at_once=4,
    )  # fmt: skip
    again = call()
    compiled = one_call._curves._cache_size()
    call()
    assert one_call._curves._cache_size() == compiled > 0
    np.testing.assert_array_equal(again.values("kl"), curves.values("kl"))
    found, values = curves["l1"], curves.values("l1")
    wanted = stats.t.interval(0.95, B - 1, loc=values[3, 1].mean(), scale=stats.sem(values[3, 1]))
    np.testing.assert_allclose((found.low[3, 1], found.high[3, 1]), wanted)
    np.testing.assert_allclose(found.mean, np.asarray(curves.losses.l1).mean((2, 3)), rtol=1e-6)
    gap = curves.difference("l1", "window", "ada_snapkv")
    np.testing.assert_allclose(gap.mean, found.mean[0] - found.mean[3])
    assert "window" in str(curves)
    with pytest.raises(ValueError, match="'loss' is not one of"):
        curves.values("loss")
    with pytest.raises(ValueError, match="'nobody' is not one of"):
        curves.difference("l1", "window", "nobody")
    assert analysis.interval(np.ones((2, 1))).high.tolist() == [np.inf, np.inf]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": {}}, "0 policies at 4 budgets"),
        ({"policies": {"x": methods.snapkv(8, window_size=4)}}, "'x' is Evict.*give a method that takes a budget"),
        ({"policies": {"x": methods.snapkv}}, "a budget of 6 tokens cannot hold the 32"),
        ({"policies": {"x": lambda b: kvjax.chain(snapkv(b), methods.think())}}, "'x' changes how keys are stored"),
        ({"policies": {"x": methods.dilated_window}}, "'x' hides tokens from single rows"),
        ({"policies": {"x": lambda b: kvjax.soften(methods.tova(b), 0.1)}}, "'x' keeps a part of every token"),
        (
            {
                "policies": {
                    "x": lambda b: kvjax.partition({"a": snapkv(b), "b": snapkv(b, granularity="query_head")}, "aba")
                }
            },
            "have slots of several kinds",
        ),
        ({"continuation": np.ones((2, 4), int)}, "3 prompts, but 2 continuations"),
        ({"continuation": np.ones((3, 0), int)}, "empty"),
        ({"seeds": 0}, "seeds=0"),
        ({"lengths": [24, 24, 99]}, "prompt lengths must lie between 1 and the prompt's width 24"),
    ],
)
def test_what_cannot_work_is_refused(tiny, prompts, change, message):
    model, params = tiny
    tokens, continuation, _ = prompts
    call = {"continuation": continuation, "policies": {"window": methods.window}, "lengths": LENGTHS, **change}
    with pytest.raises(ValueError, match=message):
        analysis.curves(model, params, tokens, call.pop("continuation"), call.pop("policies"), BUDGETS, **call)


@pytest.mark.parametrize("shape", [(1, B, 2, T), (3, B, 3, T), (3, B, 2, T - 1)])
def test_masks_of_another_reading_are_refused(tiny, prompts, shape):
    model, params = tiny
    read = reading(tiny, prompts, plans(tiny, "window"))
    with pytest.raises(ValueError, match=r"keep has the shape .* \(3, 3, 2, 24\) or \(3, 3, 4, 24\); give one mask"):
        analysis.mask_losses(model, params, read, jnp.ones(shape, bool))


@pytest.mark.parametrize("rows", [1, 32])
def test_adaptive_heads_lower_the_bound_on_every_layer_and_prompt(embedded, rows):
    """Theorem 4 on the embedded model and held-out text, for the rows that scored the tokens.

    Also with the safeguard: whole budgets between the uniform and the adaptive ones trade tokens below the layer's
    threshold for tokens above it, so every alpha lowers the bound, and a larger one lowers it more.
    """
    model, params, tokenizer = embedded
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    task = Task(encode, (tokenizer.bos_token_id,), 256 + 64, 0)
    prompts = [TASKS["perplexity"](task, 500 + i) for i in range(6)]
    tokens, continuation = (
        np.array([e.context for e in prompts]),
        np.array([e.questions[0].continuation[:4] for e in prompts]),
    )
    budgets = (0.0625, 0.1, 0.125, 0.18, 0.25)
    score = kvjax.scoring.scores.Window(rows)
    make = functools.partial(kvjax.Evict, score)
    heads = {0.0: kvjax.UniformHeads(), **{a: kvjax.Adaptive(a, float("inf")) for a in (0.5, 1.0)}}
    plan = functools.partial(kvjax.make_plan, model.config, prompt_len=256, max_new_tokens=4)
    plans = {a: [plan(make(b, heads=h)) for b in budgets] for a, h in heads.items()}
    read = analysis.read(model, params, tokens, continuation, measure=analysis.measurements(plans[0.0]))
    keep = {a: grid.keep_all(p, read)[:, 0] for a, p in plans.items()}
    of = [layer.stats["kv_head"][score.observe("prefill")[0]] / rows for layer in read.layers]
    mass = jnp.stack(of)
    np.testing.assert_allclose(mass.sum(-1), 1.0, atol=1e-5)
    largest = np.asarray(analysis.value_bounds(read))
    lost = {a: np.asarray(analysis.lost_mass(jnp.broadcast_to(mass[None], k.shape), k)) for a, k in keep.items()}
    bound = {a: 2 * 8 * largest * x.mean(-1) for a, x in lost.items()}
    assert bound[0.0].shape == (5, 4, 6)
    for lower, higher in ((1.0, 0.5), (0.5, 0.0)):
        assert (bound[lower] <= bound[higher] * (1 + 1e-6)).all()
        assert (bound[lower] < bound[higher]).mean() > 0.5
    for k in keep.values():
        np.testing.assert_array_equal(k.sum((-1, -2)), keep[0.0].sum((-1, -2)))


def test_memory_is_linear_in_the_prompt(tiny):
    model, params = tiny

    def temporaries(length):
        plan = lambda policy: kvjax.make_plan(
            model.config, policy, prompt_len=length, max_new_tokens=8, lengths=[length]
        )
        grid = tuple(tuple(plan(f(b)) for b in (64, 128)) for f in (methods.h2o, methods.ada_snapkv))
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
        lowered = one_call._curves.lower(
            model, params, ints(1, length), ints(1, 8), ints(1), keys, grid=grid,
            counts=(kvjax.Tokens(64), kvjax.Tokens(128)), seeds=1, oracles=("model",), at_once=1,
        )  # fmt: skip
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(2048), temporaries(8192)
    assert large < 5 * small
    assert large < 8192 * 8192  # no matrix of tokens by tokens, of any kind
