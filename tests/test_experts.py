import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.experts import Experts, ExpertsConfig, block_size, blocks

SIZES = {"vocab_size": 61, "embed_dim": 8, "mlp_dim": 8, "num_layers": 1, "num_query_heads": 1, "num_kv_heads": 1}
E, K = 5, 2


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("all_to_one", [True, False])
def test_every_token_gets_its_experts(normalized, all_to_one):
    config = ExpertsConfig(**SIZES, head_dim=8, num_experts=E, experts_per_token=K, expert_dim=6, normalized=normalized)
    experts = Experts(config, ("w1", "w3", "w2"))
    x = jnp.abs(jax.random.normal(jax.random.key(0), (2, 11, 8)))
    params = experts.init(jax.random.key(1), x)["params"]
    if all_to_one:
        params["gate"]["weight"] = params["gate"]["weight"].at[3].set(9.0)
    found = experts.apply({"params": params}, x)

    p = np.asarray(jax.nn.softmax(x @ params["gate"]["weight"].T))
    w1, w3, w2 = (np.asarray(params["experts"][name]) for name in ("w1", "w3", "w2"))
    expected = np.zeros(x.shape)
    for b, t in np.ndindex(2, 11):
        chosen = np.argsort(-p[b, t])[:K]
        assert not all_to_one or chosen[0] == 3
        share = p[b, t, chosen].sum() if normalized else 1.0
        for e in chosen:
            h = np.asarray(jax.nn.silu(w1[e] @ x[b, t])) * (w3[e] @ x[b, t])
            expected[b, t] += p[b, t, e] / share * (w2[e] @ h)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("chosen", [[4] * 9, [0, 1, 2, 3, 4, 0, 1, 2, 3], [3, 3, 1, 1, 1, 1, 1, 0, 3]])
def test_blocks_have_every_assignment_once_and_one_expert_each(chosen, size):
    place, owner = map(np.asarray, blocks(jnp.asarray(chosen, jnp.int32), E, size))
    assert sorted(place[place < 9]) == list(range(9))
    for inside, expert in zip(place, owner, strict=True):
        assert all(chosen[i] == expert for i in inside if i < 9)


def test_a_block_is_about_an_experts_share():
    assert [block_size(n, 8) for n in (1, 8, 9, 20, 10**6)] == [1, 1, 1, 2, 128]


def test_a_token_goes_to_no_more_experts_than_there_are():
    with pytest.raises(ValueError, match="every token goes to 6 experts, but there are 5"):
        ExpertsConfig(**SIZES, head_dim=8, num_experts=5, experts_per_token=6)
