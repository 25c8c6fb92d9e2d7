"""What users give is checked before anything is traced; what drivers refuse is tested with them."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Evict, Policy, methods, models
from kvjax.contract import Score
from kvjax.methods.released import papers
from kvjax.observe import Rows
from kvjax.run.checks import check_prompts
from tests import tensors

IDS = np.asarray(tensors.token_ids(2, 24))
FASTGEN, STEPWISE = methods.fastgen((1,), (2,)), papers.h2o_stepwise_mask(8)
WHOLE = "FastGen looks at the whole prompt at once, but block=5 reads 24 tokens in parts; use block=None"
ROWS = (
    "every row of StepwiseMask decides what the next one reads, but block={} reads 24 tokens otherwise than one by one"
)


@pytest.mark.parametrize(
    ("policy", "block", "message"),
    [
        (FASTGEN, 5, WHOLE),
        (kvjax.chain(FASTGEN, methods.tova(8)), 5, "Chain looks at the whole prompt"),
        (
            kvjax.partition({"f": FASTGEN, "t": methods.tova(8)}, ["t", "f", "t"]),
            5,
            "FastGen looks at the whole prompt",
        ),
        (papers.h2o_next_step_mask(8), 5, "NextStepMask looks at the whole prompt"),
        (STEPWISE, None, ROWS.format(None)),
        (STEPWISE, 5, ROWS.format(5)),
    ],
)
def test_blocks_are_refused_where_a_policy_cannot_read_them(policy, block, message, tiny):
    with pytest.raises(ValueError, match=message):
        kvjax.generate(*tiny, IDS, policy=policy, block=block, max_new_tokens=2)


HOLDS_NONE = types.SimpleNamespace(num_layers=1, holds_kv=lambda layer: False)


class Own:
    """A model of a user's own, without the shapes of its parameters, and with other members; None for one it lacks."""

    def __init__(self, model, **members):
        self._model, self._members = model, members

    def __getattr__(self, name):
        if name == "shapes" or self._members.get(name, ...) is None:
            raise AttributeError(name)
        return self._members[name] if name in self._members else getattr(self._model, name)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"alike": None}, "must be a model, such as models.load.* with config, alike, parts, embed, block and head"),
        ({"alike": (0, 0)}, r"alike=\(0, 0\) must be a tuple of 1 layers, of each the first like it"),
        ({"alike": (1,)}, r"alike=\(1,\) must be a tuple of 1 layers"),
        ({"parts": lambda params: params}, "parts must return what is of no layer, and a tuple of what is of 1 layers"),
        (
            {"config": types.SimpleNamespace(num_layers=1, holds_kv=lambda layer: False)},
            "config.holds_kv is true of 0 of 1 layers; it must be of one",
        ),
        ({"block": lambda *given: given[2:4]}, "block must return three values: x, the cache, and what else"),
        ({"head": lambda params, x: x}, r"head gives \d+ logits a token, but vocab_size is"),
    ],
)
def test_a_model_of_ones_own_is_told_what_it_lacks(members, message, shallow):
    model, params = shallow
    with pytest.raises(ValueError, match=message):
        kvjax.prefill(Own(model, **members), params, IDS, policy=methods.h2o(8), max_new_tokens=1)


@pytest.mark.parametrize(("policy", "block"), [(FASTGEN, None), (FASTGEN, 24), (STEPWISE, 1)])
def test_other_sizes_are_not(policy, block, shallow):
    model, _ = shallow
    read = lambda p: kvjax.prefill(model, p, IDS, policy=policy, block=block, max_new_tokens=2)
    jax.eval_shape(read, model.shapes)


def test_what_is_read_by_other_doors_is_refused_too(shallow):
    model, params = shallow
    start = lambda policy: kvjax.start(model, policy=policy, lengths=[24, 24], max_new_tokens=9)
    with pytest.raises(ValueError, match="StepwiseMask decides what the next one reads, but block=None reads 24"):
        kvjax.forward(model, params, IDS, start(STEPWISE))
    with pytest.raises(ValueError, match="evict_layer reads 24 tokens at once"):
        kvjax.evict_layer(STEPWISE, *tensors.qkv())


@pytest.mark.parametrize("traced", [False, True])
def test_a_mask_says_where_the_tokens_are(shallow, traced):
    """On the left, on the right or with holes: they are moved together, as transformers counts their positions."""
    ids, masks = (
        np.array([[9, 1, 2, 9], [3, 9, 9, 9], [4, 9, 5, 6]]),
        np.array([[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 1, 1]]),
    )
    check = lambda ids, masks: check_prompts(shallow[0], ids, attention_mask=masks)
    tokens, lengths = (jax.jit(check) if traced else check)(ids, masks)
    assert lengths.tolist() == [2, 1, 3]
    assert [row[4 - n :] for row, n in zip(tokens.tolist(), lengths, strict=True)] == [[1, 2], [3], [4, 5, 6]]


def test_pad_left():
    tokens, lengths = models.pad_left([[1, 2, 3], [4]], pad_id=9)
    assert tokens.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert lengths.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("ids", "lengths", "told"),
    [
        ([[1, 2, 3, 0, 0]], [3], True),
        ([[1, 0, 0, 0, 0]], [1], True),
        ([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0], [1, 2, 3, 0, 0]], [5, 4, 3], True),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 0]], [5, 4], False),  # one column of padding may be any id
        ([[0, 0, 1, 2, 2]], [3], False),
        ([[99, 98, 1, 2, 3]], [3], False),
        ([[8, 9, 1, 2, 2], [7, 8, 1, 2, 3]], [3, 3], False),  # where all are padded on one side, it is the left one
        ([[1, 2, 3, 0, 0]], None, False),
    ],
)
def test_lengths_are_those_of_prompts_padded_on_the_left(shallow, ids, lengths, told):
    """On the right they are refused, where that can be told from ids that happen to be alike."""
    ids = np.array(ids)
    if told:
        with pytest.raises(ValueError, match=r"as if it were padded on the right.*pad on the left \(models.pad_left\)"):
            check_prompts(shallow[0], ids, lengths)
        given = np.arange(5)[None] < np.array(lengths)[:, None]
        assert check_prompts(shallow[0], ids, attention_mask=given)[1].tolist() == lengths
    else:
        assert (check_prompts(shallow[0], ids, lengths)[0] == ids).all()


class Weighted(Policy):
    """Has parameters, and looks at what it did not ask for."""

    def init_params(self, info, key):
        return {"w": jnp.zeros((info.num_kv_heads, 3))}

    def update(self, kv, stats, ctx):
        return kv.keep(stats[Rows()] > ctx.params["w"][:, :1])


class Line(Score):
    """The position, times a number that is learned."""

    def init_params(self, info, key):
        return {"a": jnp.ones((info.num_kv_heads,))}

    def __call__(self, slots):
        return slots.params["a"][None, :, None] * slots.kv.pos.astype(jnp.float32)


LINE = Evict(Line(), 3)


@pytest.mark.parametrize(
    ("policy", "own", "message"),
    [
        (
            kvjax.chain(methods.snapkv(4, window=2), LINE),
            [((), {"score": {"b": np.ones(2)}})],
            r"params\[1\]\['score'\]\['a'\] is missing, but the policy has \(2,\)",
        ),
        (Weighted(), None, "the policy has learned parameters: give policy_params="),
        (Weighted(), [{"w": np.zeros((2, 3))}] * 2, "has 2 trees for 1 layers"),
        (
            Weighted(),
            [{"w": np.zeros((1, 3))}],
            r"of layer 0 do not fit Weighted: params\['w'\] is \(1, 3\), but .* \(2, 3\)",
        ),
        (Weighted(), [{"v": np.zeros((2, 3))}], r"params\['v'\] is \(2, 3\), but the policy has no parameter there"),
        (methods.tova(8), [np.zeros(3)], "params is .3,., but the policy has no parameter there"),
        (Weighted(), [{"w": np.zeros((2, 3))}], "was not observed; list it in `observe`"),
    ],
)
def test_policies_and_their_parameters_fit(policy, own, message, shallow):
    """A model, and the door to raw tensors."""
    model, params = shallow
    with pytest.raises(ValueError, match=message):
        kvjax.prefill(model, params, IDS, policy=policy, policy_params=own, max_new_tokens=2)
    if own is None or len(own) == 1:
        with pytest.raises(ValueError, match=message):
            kvjax.evict_layer(policy, *tensors.qkv(), policy_params=() if own is None else own[0])


def test_dicts_stand_for_what_a_policy_has_learned_wherever_it_is_applied(shallow):
    """In an `Evict`, in a chain, and by hand; a state that has none is refused there, too."""
    model, params = shallow
    how = {"lengths": [IDS.shape[1]] * 2, "max_new_tokens": 1}
    first = {"score": {"a": -np.ones(2)}}
    for policy, own in ((LINE, first), (kvjax.chain(LINE, LINE), [first, first])):
        _, state = kvjax.prefill(model, params, IDS, policy=policy, policy_params=[own], max_new_tokens=1)
        assert np.sort(state.layers[0].head_pos)[..., -3:].tolist() == [[[0, 1, 2]] * 2] * 2
        _, full, stats = kvjax.forward(
            model, params, IDS, kvjax.start(model, policy=kvjax.Policy(), **how), observe=(LINE,)
        )
        by_hand = policy(dataclasses.replace(full, params=(own,)), stats)
        np.testing.assert_array_equal(by_hand.layers[0].head_pos, state.layers[0].head_pos)
        with pytest.raises(ValueError, match="the policy has learned parameters"):
            policy(full, stats)


BAD_DOORS = [
    ({"valid": [9, 8]}, "valid goes from 8 to 9, but a row has 0 to 8 tokens"),
    ({"valid": [8, 7]}, "prompt 1 is read with 7 tokens, but the state was started for 8; give valid=lengths"),
    ({"valid": [8]}, r"valid must be integers, of shape \(2\)"),
    ({"tokens": np.full((2, 8), -3)}, "token id -3 is outside the vocabulary, 0 to 60"),
    ({"tokens": np.zeros((2, 8))}, "tokens must be integers, one row a sequence"),
    ({"tokens": np.zeros((3, 8), int)}, r"of shape \(2, any\)|3 sequences"),
]


@pytest.mark.parametrize(("change", "message"), BAD_DOORS)
@pytest.mark.usefixtures("unchecked")
def test_forward_refuses_what_does_not_fit(shallow, change, message):
    state = kvjax.start(shallow[0], policy=methods.h2o(6), lengths=[8, 8], max_new_tokens=2)
    given = {"model": shallow[0], "params": shallow[1], "tokens": np.ones((2, 8), int), "state": state}
    with pytest.raises(ValueError, match=message):
        kvjax.forward(**given | change)


@pytest.mark.usefixtures("unchecked")
def test_a_policy_is_applied_to_what_it_has_seen(shallow):
    """Once, to a state and to statistics; a whole prompt is not read on without it."""
    model, params = shallow
    tokens, h2o = np.ones((2, 8), int), methods.h2o(6)
    state = kvjax.start(model, policy=h2o, lengths=[8, 8], max_new_tokens=2)
    _, state, stats = kvjax.forward(model, params, tokens, state)
    with pytest.raises(ValueError, match="stats is a NoneType"):
        h2o(state, None)
    with pytest.raises(ValueError, match="state is a AttnStats"):
        h2o(stats, stats)
    with pytest.raises(ValueError, match=r"was not observed: give the policy to forward\(..., observe=\)"):
        methods.roco(6)(state, stats)
    with pytest.raises(ValueError, match="apply a policy to it, policy"):
        kvjax.forward(model, params, tokens, state)
