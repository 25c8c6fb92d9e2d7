"""All sizes of a run, known before anything is traced."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from kvjax.compose.around import having
from kvjax.contract import MOST, Amount, Config, LayerInfo, Policy, Size, compiled, kv_layers, kv_shape, unique, value
from kvjax.observe import Reread

_TILE = 8  # what sizes are rounded up to: rows of a tile that a kernel reads
_STEP = 16  # the same, where sizes differ


@value
class Plan:
    """The sizes of compiled programs. Equal plans share programs, whatever their budgets.

    Attributes:
      policy: the policy without data, if it decides for all layers at once; else the full cache.
      layers: the policy of every layer, without data.
      infos: the shape of every layer.
      capacities: slots of a head in every layer, or of all its heads in a pool: multiples of 8, as kernels read them,
        and of 16 where layers differ, so that one program compacts several.
      fitted: whether slots are those that tokens of a prompt need, and not all that the budgets might (`State.fit`).
    """

    policy: Policy
    layers: tuple[Policy, ...]
    infos: tuple[LayerInfo, ...]
    capacities: tuple[int, ...]
    fitted: bool = False

    @property
    def num_slots(self) -> int:
        """Slots of one sequence, over all layers and kv heads."""
        each = zip(self.layers, self.infos, self.capacities, strict=True)
        return sum(n if policy.layout.pool else n * info.num_kv_heads for policy, info, n in each)

    @property
    def again(self) -> tuple[Reread, ...]:
        """The ways in which any layer wants the prompt to be repeated."""
        return unique(o for policy in self.layers for o in rereads(policy))

    @functools.cached_property
    def decoding(self) -> "Plan":
        """The plan with the sizes alone that a decode step asks for, so that prompts of many widths share programs.

        It is told a width of prompts that is a power of two, at least 1,024; the exact one in a pool that it writes to.
        """
        width = lambda n: max(1 << (n - 1).bit_length(), 1024)
        exact = [policy.writes and policy.layout.pool for policy in self.layers]
        infos = tuple(
            dataclasses.replace(x, prompt_len=x.prompt_len if own else width(x.prompt_len), max_new_tokens=0)
            for x, own in zip(self.infos, exact, strict=True)
        )
        slots = tuple(n if policy.writes else 0 for policy, n in zip(self.layers, self.capacities, strict=True))
        return dataclasses.replace(self, infos=infos, capacities=slots)


def infos_of(config: Config, policy: Policy, width: int, max_new_tokens: int) -> tuple[LayerInfo, ...]:
    """The `LayerInfo` of every layer that holds keys and values, of a model that runs under a policy.

    Args:
      config: the model's configuration.
      policy: the policy.
      width: columns of the padded prompts.
      max_new_tokens: decode steps that the run is planned for.

    Raises:
      ValueError: tokens that are to stand at their ranks, where the model's positions cannot be changed, or under a
        policy that writes keys.
    """
    each, N = kv_layers(config), config.num_query_heads
    L, shapes = len(each), [kv_shape(config, n) for n in each]
    heads = lambda i: N if policy.at(i, L).layout.by_query_head else shapes[i].num_kv_heads
    window = getattr(config, "window", lambda i: None)
    D = getattr(config, "embed_dim", 0)
    for i in range(L):
        here = policy.at(i, L)
        where = here.layout.positions
        if where != "original" and getattr(config, "learned_positions", False):
            raise ValueError(
                f'layer {i} wants tokens at positions="{where}", but the model adds learned positions to its '
                'embeddings, so that a stored key stays where it is; use "original"'
            )
        if where == "shifted" and not getattr(config, "additive_rotation", True):
            raise ValueError(
                f'layer {i} wants tokens at positions="shifted", but in the model\'s rotary scaling a key cannot be '
                "turned once more: YaRN and longrope multiply it by a factor at each turn, dynamic scaling and "
                'longrope turn by the length of the text; use "rank"'
            )
        if where != "original" and "k" in here.writes:
            raise ValueError(
                f'layer {i} wants tokens at positions="{where}", where a key moves with its rank, but '
                f'{type(here).__name__} writes keys, which hold where they were written; use "original"'
            )
    run = width, max_new_tokens, D
    return tuple(
        LayerInfo(i, L, N, heads(i), x.head_dim, *run, window(n), x.latent)
        for i, (n, x) in enumerate(zip(each, shapes, strict=True))
    )


def _check_shapes(policy: Policy, infos: tuple[LayerInfo, ...]) -> None:
    """Refuses a policy that cannot work with what layers store of a token."""
    if policy.joint and len(numbers := sorted({x.num_kv_heads for x in infos})) > 1:
        raise ValueError(
            f"{type(policy).__name__} decides for all layers at once, but the model's have {numbers} kv heads; give a "
            "policy that decides in each layer by itself"
        )
    for i, info in enumerate(infos):
        here = policy.at(i, len(infos))
        if (codec := here.layout.codec) is not None:
            codec.check(info.head_dim)
            if codec.keys is not None and (drops := having(here, "channels")):
                raise ValueError(
                    f"{type(drops[0]).__name__} drops key channels, but {codec.keys} codes keys of all; give "
                    "Codec(None, values)"
                )
            if info.latent:
                raise ValueError(
                    f"layer {i} holds latents, of which each is a key and its value in one, but {codec} codes keys and "
                    "values apart; leave out the codec"
                )
        if info.latent and (own := [n for n in here.writes if n != "log_weight"]):
            raise ValueError(
                f"layer {i} holds latents, of which each is a key and its value in one, but {type(here).__name__} "
                f"writes {' and '.join(own)}; choose a policy that writes neither"
            )


def bucket(n: int) -> int:
    """Rounds n tokens up: to a multiple of 16, beyond 128 to one of four sizes in a power of two.

    So a size is less than 16 tokens larger than n, or at most a quarter.
    """
    step = max(_STEP, 1 << max((n - 1).bit_length() - 3, 0))
    return -(-n // step) * step


def make_plan(
    config: Config,
    policy: Policy,
    lengths: Int[Array, "B"] | Int[np.ndarray, "B"] | Sequence[Size],
    width: Size,
    max_new_tokens: Amount,
) -> Plan:
    """The plan of a policy. A run that is given it as `plan=` has its slots and shares its programs.

    Args:
      config: the model's configuration.
      policy: the policy.
      lengths: tokens of each prompt.
      width: columns of the padded prompts.
      max_new_tokens: decode steps that the run is planned for.

    Raises:
      ValueError: sizes that the policy cannot work with, prompts without a token or with more than `width`.
    """
    lengths = lengths if isinstance(lengths, jax.core.Tracer) else np.asarray(lengths, np.int64)
    if not isinstance(lengths, jax.core.Tracer) and not 1 <= np.min(lengths, initial=MOST) <= np.max(lengths) <= width:
        raise ValueError(f"lengths={lengths} must lie between 1 and width={width}; give the tokens of each prompt")
    return planned(policy, infos_of(config, policy, width, max_new_tokens), lengths)[0]


def fitted(plan: Plan, need: Sequence[Size]) -> Plan:
    """The plan with so many slots in each layer, rounded up (`bucket`), so that runs share programs."""
    capacities = tuple(min(bucket(int(n)), most) for n, most in zip(need, plan.capacities, strict=True))
    return dataclasses.replace(plan, capacities=capacities, fitted=True)


def sharing(plans: Iterable[Plan]) -> list[Plan]:
    """The plans with more slots, so that those that differ in slots alone are equal and share programs."""
    plans, most = [*plans], dict[Plan, tuple[int, ...]]()
    bare = [dataclasses.replace(plan, capacities=()) for plan in plans]
    for kind, plan in zip(bare, plans, strict=True):
        most[kind] = tuple(map(max, most.get(kind, plan.capacities), plan.capacities))
    return [dataclasses.replace(kind, capacities=most[kind]) for kind in bare]


def planned(
    policy: Policy,
    infos: tuple[LayerInfo, ...],
    lengths: Int[Array, "B"] | Int[np.ndarray, "B"],
    plan: Plan | None = None,
    *,
    longest: int | None = None,
    held: bool = False,
) -> tuple[Plan, tuple[PyTree, ...]]:
    """The plan of a run, and its `hparams`, a tree of arrays "B ..." for every layer.

    Args:
      policy: the policy.
      infos: the shape of every layer.
      lengths: tokens of each prompt. Where they are traced, there are slots for the longest prompt that can be.
      plan: that of a run with as many slots or more, to use instead.
      longest: tokens of another prompt, longer than these, for which there are slots, too.
      held: whether the plan is that of a fitted state, which has slots for its tokens and those to come.

    Raises:
      ValueError: the given plan has too few slots, or is that of another policy; a policy that writes keys or values,
        where these are one, or that decides for all layers at once, where they differ in heads.
    """
    traced, L = isinstance(lengths, jax.core.Tracer), len(infos)
    prompts = np.arange(1, infos[0].prompt_len + 1) if traced else np.asarray(lengths)
    each = [policy.at(i, L) for i in range(L)]
    _check_shapes(policy, infos)
    sizes = [p.sizes(info, prompts) for p, info in zip(each, infos, strict=True)]
    hparams = tuple(x.hparams for x in sizes)
    if traced:  # the data of all lengths, of which each sequence takes its own
        hparams = jax.tree.map(lambda x: jnp.asarray(x)[lengths - 1], hparams)
    total = lambda p, x: np.asarray(x.total if p.layout.pool else x.per_head)
    slots = [total(p, x) for p, x in zip(each, sizes, strict=True)]
    if longest is not None:
        more = [total(p, p.sizes(info, np.array([longest]))) for p, info in zip(each, infos, strict=True)]
        slots = [np.append(n, x) for n, x in zip(slots, more, strict=True)]
    need = tuple(int(n.max()) for n in slots)
    size = _STEP if len(set(need)) > 1 else _TILE
    capacities = tuple(-(-n // size) * size for n in need)
    found = Plan(compiled(policy) if policy.joint else Policy(), tuple(map(compiled, each)), infos, capacities)
    if plan is None:
        return found, hparams
    if (plan.layers, plan.policy, plan.infos) != (found.layers, found.policy, found.infos):
        raise ValueError(
            "the plan is that of another policy or another run: fields other than budgets, the prompts' width or "
            "max_new_tokens differ; make the plan from the same policy with a larger budget"
        )
    if traced:  # there may be no prompt as long as the longest
        need = tuple(int(n.min()) for n in slots)
    if not held and (short := [i for i in range(L) if need[i] > plan.capacities[i]]):
        raise ValueError(
            f"layer {short[0]} needs {need[short[0]]} slots, but the plan has {plan.capacities[short[0]]}; make the "
            "plan from the largest budget that will run under it"
        )
    return plan, hparams


def plan_request(
    config: Config,
    policy: Policy,
    lengths: Int[np.ndarray, "B"] | Int[Array, "B"],
    width: int,
    max_new_tokens: int,
    *,
    plan: Plan | None = None,
    buckets: bool = False,
) -> tuple[Plan, tuple[PyTree, ...]]:
    """The sizes that a request is compiled for, those of `plan` if there is one, and the policy's numbers for it.

    With `buckets`, width and new tokens are rounded up, and there are slots for a prompt of the rounded width. What is
    kept is the same. A policy that cannot work with the rounded sizes gets the exact ones.
    """
    make = lambda width, steps, **how: planned(policy, infos_of(config, policy, width, steps), lengths, plan, **how)
    if plan is not None:
        there = plan.infos[0].prompt_len, plan.infos[0].max_new_tokens
        if width > there[0] or max_new_tokens > there[1]:
            raise ValueError(
                f"a prompt of {width} columns and {max_new_tokens} new tokens are more than the plan's {there[0]} and "
                f"{there[1]}; make the plan for these"
            )
        return make(*there)
    if not buckets or isinstance(lengths, jax.core.Tracer):
        return make(width, max_new_tokens)
    try:
        return make(bucket(width), bucket(max_new_tokens), longest=bucket(width))
    except ValueError:
        return make(width, max_new_tokens)


def init_policy_params(
    config: Config, policy: Policy, key: Key[Array, ""], *, width: Amount = 0, max_new_tokens: Amount = 0
) -> tuple[PyTree, ...]:
    """Learned parameters of a policy to begin with, a tree for every layer: what `policy_params=` takes.

    Args:
      config: the model's configuration.
      policy: the policy.
      key: a PRNG key.
      width: columns of the padded prompts, if the parameters' shapes depend on it.
      max_new_tokens: decode steps of the run, if they depend on it.
    """
    infos = infos_of(config, policy, width, max_new_tokens)
    return tuple(policy.at(i, len(infos)).init_params(info, jax.random.fold_in(key, i)) for i, info in enumerate(infos))


def own_params(policy: Policy, infos: tuple[LayerInfo, ...], given: PyTree) -> tuple[PyTree, ...]:
    """Learned parameters, a tree a layer, as the policy names them; () if it has none.

    Raises:
      ValueError: another number of trees than of layers, and what `layer_params` refuses.
    """
    L, given = len(infos), tuple(given)
    if given and len(given) != L:
        raise ValueError(f"policy_params has {len(given)} trees for {L} layers; give one a layer")
    each = [layer_params(policy.at(i, L), info, given[i] if given else ()) for i, info in enumerate(infos)]
    return tuple(each) if jax.tree.leaves(each) else ()


def layer_params(policy: Policy, info: LayerInfo, given: PyTree) -> PyTree:
    """The learned parameters of one layer in the containers that its policy begins with.

    Dicts may stand for what has names, and lists for tuples.

    Raises:
      ValueError: other names or shapes than the policy begins with.
    """
    wanted, tree = _begun(policy, info)
    named = lambda leaves: {jax.tree_util.keystr(path): x for path, x in leaves}
    wanted = {n: x.shape for n, x in named(wanted).items()}
    here = named(jax.tree_util.tree_leaves_with_path(given))
    if wanted and not here:
        raise ValueError(
            "the policy has learned parameters: give policy_params=, those of init_policy_params to begin with"
        )
    fits = lambda n: n in wanted and n in here and (0 in wanted[n] or wanted[n] == jnp.shape(here[n]))  # 0: not known
    if wrong := [n for n in sorted({*wanted, *here}) if not fits(n)]:
        n, found = wrong[0], {name: jnp.shape(x) for name, x in here.items()}
        raise ValueError(
            f"policy_params of layer {info.layer} do not fit {type(policy).__name__}: params{n} is "
            f"{found.get(n, 'missing')}, but the policy has {wanted.get(n, 'no parameter there')}; give those of "
            "init_policy_params, or others of their names and shapes"
        )
    return jax.tree.unflatten(tree, [here[n] for n in wanted])


def rereads(policy: Policy) -> tuple[Reread, ...]:
    """The ways in which a layer's policy wants the prompt to be repeated."""
    return tuple(o for o in policy.observe("replay") if isinstance(o, Reread))


def learns(policy: Policy, infos: tuple[LayerInfo, ...]) -> bool:
    """Whether the policy has learned parameters in any layer."""
    return any(_begun(policy.at(i, len(infos)), info)[0] for i, info in enumerate(infos))


# Names with shapes, and containers, of the learned parameters that a layer's policy begins with.
_begun: Callable[[Policy, LayerInfo], tuple[list[Any], Any]] = functools.lru_cache(maxsize=1024)(
    lambda policy, info: jax.tree_util.tree_flatten_with_path(
        jax.eval_shape(lambda: policy.init_params(info, jax.random.key(0)))
    )
)
