"""The laws of policies, over the one table of methods: values, and what one decision after a prompt does to a layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.compose.around import having
from kvjax.compose.evict import evicts
from kvjax.contract import Layout, resolve
from kvjax.storage import to_pool
from tests import one_call, table
from tests.one_call import LAYERS, LENGTHS, T, unturned
from tests.tensors import live_positions

pytestmark = pytest.mark.usefixtures("as_users_run_it")

SIXTEEN = kvjax.models.ModelConfig(61, 12, 16, 3, 4, 2, 8, dtype="bfloat16")
WHOLE, PADDED, SWAPPED, MOVED, HOLES = range(5)  # the sequences of `one_call.decided`

every_method = table.rows(table.QUICK)


# ------------------------------------------------------------------------------------------------ 16 bits


def equations(jaxpr):
    """All of a program, those of programs inside of it included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=lambda x: hasattr(x, "eqns")):
            inside = getattr(value, "jaxpr", value)
            yield from equations(inside) if hasattr(inside, "eqns") else ()


def read_and_decode(case, params):
    """Logits of a prompt and of a token that follows it, of a bfloat16 model."""
    model, tokens = kvjax.models.LanguageModel(SIXTEEN), np.ones((2, 24), np.int32)
    how = {"policy": case.policy, "max_new_tokens": 4, "lengths": np.array([20, 24])}
    first, state = kvjax.prefill(model, params, tokens, **how)
    return first, kvjax.feed(model, params, tokens[:, :1], state)[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", [table.Case(n) for n in table.MAKE if "kvzap" not in n], ids=repr)  # float32 functions
def test_products_of_16_bits_are_in_an_order_of_axes_that_xla_has_on_every_cpu(case):
    """Where the result is wider: batches are first, and a transposed first factor's other one has one free axis.

    On some CPUs XLA compiles others and ends in an error when they run.
    """
    params = jax.eval_shape(kvjax.models.LanguageModel(SIXTEEN).init, jax.random.key(0))
    program = jax.make_jaxpr(lambda params: read_and_decode(case, params))(params)
    products = [x for x in equations(program.jaxpr) if x.primitive.name == "dot_general"]
    assert products
    for product in products:
        given, made = ([x.aval.dtype.itemsize for x in each] for each in (product.invars, product.outvars))
        (left, right), batches = product.params["dimension_numbers"]
        first, second = (x.aval.ndim for x in product.invars)
        batches_first = all(tuple(batch) == tuple(range(len(batch))) for batch in batches)
        in_order = batches_first and (first - 1 in left or second - len(right) - len(batches[1]) <= 1)
        assert min(given) > 2 or max(made) <= 2 or in_order


@table.rows(table.QUICK, smoke=())
def test_a_bfloat16_model_reads_and_decodes(case):
    params = kvjax.models.LanguageModel(SIXTEEN).init(jax.random.key(0))
    assert all(jnp.isfinite(x).all() for x in read_and_decode(case, params))


# ------------------------------------------------------------------------------------------------ values

every_value = pytest.mark.parametrize("case", [table.Case(name) for name in table.MAKE], ids=repr)


@every_value
def test_equal_policies_are_equal_values(case):
    one, other = case.make(case.budget), case.make(case.budget)
    if "hidden" not in repr(one):  # holds a function of arrays, which is equal to itself alone
        assert one == other
        assert hash(one) == hash(other)
        assert repr(one) == repr(other)


@pytest.mark.parametrize("case", [table.Case(name) for name in table.MAKE if name not in table.NO_BUDGET], ids=repr)
def test_policies_of_other_budgets_are_other_values(case):
    budgets = (20, 21) if case.budget == 10 else (0.5, 0.6)
    assert case.make(budgets[0]) != case.make(budgets[1])


@every_value
def test_no_policy_is_the_unit_of_chain(case):
    policy = case.policy
    assert kvjax.chain(kvjax.Policy(), policy) == policy == kvjax.chain(policy, kvjax.Policy())


def chained(*policies):
    """The chain, or why there is none."""
    try:
        return kvjax.chain(*policies)
    except ValueError as e:
        return str(e)


@every_value
def test_chain_is_associative(case):
    p, q, r = case.policy, methods.window(12), methods.snapkv(14, window=4)
    first, flat = chained(p, q), chained(p, q, r)
    if isinstance(flat, str):
        assert chained(p, kvjax.chain(q, r)) == flat == first
    else:
        assert chained(p, kvjax.chain(q, r)) == flat == kvjax.chain(first, r)


@every_value
def test_partition_gives_each_layer_its_policy(case):
    if case.policy.joint:
        with pytest.raises(ValueError, match="decides for all layers at once, so it cannot be a member of a partition"):
            kvjax.partition({"evict": case.policy, "keep": kvjax.Policy()}, ["keep", "evict", "keep"])
        return
    mixed = kvjax.partition({"evict": case.policy, "keep": kvjax.Policy()}, ["keep", "evict", "keep"])
    assert [mixed.at(i, LAYERS) for i in range(LAYERS)] == [kvjax.Policy(), case.policy.at(1, LAYERS), kvjax.Policy()]


@every_value
def test_a_prompt_whose_share_cannot_hold_what_is_protected_is_kept_whole(case):
    """In every layer, whatever its length."""
    if not case.takes(0.25):
        pytest.skip("it takes numbers of tokens alone")
    n = np.arange(1, T + 1)
    for layer in range(LAYERS):
        here = case.make(0.25).at(layer, LAYERS)
        for policy in evicts(here):
            found = policy.sizes(one_call.info_of(here, layer), n).hparams
            safe, average = found.sinks + found.recent, np.maximum(resolve(policy.budget, n), 1)
            assert (found.budget >= np.where(safe > average, n, np.minimum(n, safe))).all()


@every_value
def test_a_budget_that_does_not_hold_a_prompt_that_stays_is_refused_with_both_numbers(case):
    """Of what keeps tokens by position and has a budget of its own, before anything is traced."""
    if not having(case.policy, "sinks") or case.name in table.NO_BUDGET | table.PROMPT_OUTSIDE:
        pytest.skip("it keeps no tokens by position, or any prompt")
    here = kvjax.protect(case.policy, prompt=True).at(LAYERS - 1, LAYERS)
    with pytest.raises(ValueError, match=r"a budget of \d+ tokens cannot hold a prompt of (29|40) that stays and"):
        here.sizes(one_call.info_of(here, LAYERS - 1), LENGTHS)


# ------------------------------------------------------------------------------------------------ one decision


@every_method
@pytest.mark.parametrize("layer", [0, 2])
def test_budgets_and_protected_tokens_hold(case, layer):
    here = case.policy.at(layer, LAYERS)
    kept = live_positions(one_call.decided(case.policy, layer)[1])
    for row, n in ((WHOLE, LENGTHS[0]), (PADDED, LENGTHS[1])):
        table.owed(here, one_call.info_of(here, layer), int(n), case.name not in table.FEWER).check(kept[row])


@every_method
def test_no_dead_slot_comes_back_and_nothing_moves(case):
    before, after, _ = one_call.decided(case.policy)
    assert not (after.live & ~before.live).any()
    np.testing.assert_array_equal(np.where(after.live, after.pos, 0), np.where(after.live, before.pos, 0))
    for name in {"k", "v"} - {*case.policy.at(1, LAYERS).writes}:
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


@table.rows(table.QUICK, without=table.ANEW)
def test_a_decision_repeated_on_the_same_statistics_changes_nothing(case):
    _, once, twice = one_call.decided(case.policy)
    np.testing.assert_array_equal(once.pos, twice.pos)


@every_method
def test_permuting_slots_permutes_the_result(case):
    kept = live_positions(one_call.decided(case.policy)[1])
    assert kept[MOVED] == kept[WHOLE]


@table.rows(table.QUICK, without=table.BY_HEAD)
def test_permuting_kv_heads_permutes_the_result(case):
    kept = np.asarray(one_call.decided(case.policy)[1].live)
    groups = lambda x: x.reshape(one_call.K, -1, T)
    np.testing.assert_array_equal(groups(kept[SWAPPED])[::-1], groups(kept[WHOLE]))


@table.rows(table.FEW)
def test_a_chain_is_its_members_in_turn(case):
    """The second member decides among the tokens that the first one kept."""
    by_query_head = case.policy.at(1, LAYERS).layout.by_query_head
    second = dataclasses.replace(methods.tova(7), layout=Layout(by_query_head=by_query_head))
    both = chained(case.policy, second)
    if isinstance(both, str):
        pytest.skip(both)
    here, kv, stats, ctx = one_call.read(second)
    left = kv.keep(one_call.decided(case.policy)[1].live[:3])
    apart = one_call.updated(here, left, stats, ctx)
    np.testing.assert_array_equal(one_call.decided(both)[1].live[:3], apart.live)


@pytest.mark.parametrize(
    ("policy", "n"),
    [
        pytest.param(methods.snapkv(0.25, window=10), 39, marks=pytest.mark.slow),
        (methods.streaming_llm(0.25, sinks=4), 17),
        pytest.param(methods.roco(0.25, scope=10), 11, marks=pytest.mark.slow),
        pytest.param(methods.scissorhands(0.25, recent=2, drop=10), 39, marks=pytest.mark.slow),
    ],
    ids=["window", "sinks", "scope", "drop"],
)
def test_a_row_that_is_too_short_to_be_evicted_from_does_not_fail_its_batch(policy, n):
    q, k, v = map(jnp.asarray, one_call.tensors()[0])
    cut = lambda row, length: (x[row : row + 1, :, T - length :] for x in (q, k, v))
    together = np.asarray(kvjax.evict_layer(policy, q, k, v, lengths=[T, n]).live)
    assert together[1, :, T - n :].all()
    assert together[0].sum() == 10 * one_call.K
    np.testing.assert_array_equal(kvjax.evict_layer(policy, *cut(1, n)).live[0], together[1, :, T - n :])
    np.testing.assert_array_equal(kvjax.evict_layer(policy, *cut(0, T)).live[0], together[0])


def alone(policy, row):
    """What stays of one sequence's own columns, read by itself without `jit`."""
    (q, k, v), more = one_call.tensors()
    n = LENGTHS[row]
    cut = lambda x: jnp.asarray(x[row : row + 1, ..., T - n :, :])
    how = {"hidden": cut(more["hidden"]), "tokens": more["tokens"][row : row + 1, T - n :]}
    how |= {"out_proj": jnp.asarray(more["out_proj"]), "key": one_call.keys()[row : row + 1]}
    return kvjax.evict_layer(policy, cut(q), cut(k), cut(v), layer=1, num_layers=LAYERS, **how)


@table.rows(table.QUICK, without=table.OF_A_BATCH)
def test_a_padded_row_gets_what_it_gets_alone(case):
    """D-40."""
    together = one_call.decided(case.policy)[1].live[PADDED]
    found = alone(case.policy, 1)
    np.testing.assert_array_equal(together[:, T - LENGTHS[1] :], found.live[0])
    assert not np.asarray(together[:, : T - LENGTHS[1]]).any()


@table.rows(table.QUICK, without=table.OF_A_BATCH)
def test_jit_equals_eager(case):
    np.testing.assert_array_equal(one_call.decided(case.policy)[1].live[WHOLE], alone(case.policy, 0).live[0])


# ------------------------------------------------------------------------------------------------ compaction


@every_method
def test_what_is_compacted_holds_and_reads_what_is_masked(case):
    """No live token is dropped, and a row that follows finds the same, at the layer's planned size."""
    here, kv, _, ctx = one_call.read(case.policy)
    _, masked, _ = one_call.decided(case.policy)
    rows = np.array([WHOLE, PADDED])
    kv, ctx = one_call.of_rows(rows, masked, (), ctx)[::2]
    if kv.channels is not None:  # which compaction drops, too
        left = (jnp.arange(one_call.H)[:, None] == kv.channels[:, :, None]).any(-1)
        kv = kv.replace(k=jnp.where(left[:, :, None], kv.k, 0.0))
    policy = case.policy.at(1, LAYERS)
    sizes = policy.sizes(one_call.info_of(policy, 1), LENGTHS)
    pool = policy.layout.pool
    capacity = int((sizes.total if pool else sizes.per_head).max())
    small = to_pool(kv, capacity, here.reserve(kv, ctx)) if pool else kv.compact(capacity)
    view = small.view()
    assert live_positions(view) == live_positions(kv)[:2]
    q = jnp.asarray(one_call.tensors()[0][0][:, :, :1])
    found, expected = (x.attend(q, jnp.asarray(LENGTHS)[:, None] - 1, rotate=unturned).out for x in (small, kv))
    np.testing.assert_allclose(found, expected, atol=2e-6)
