"""What parameters may be, by their annotations, at every public door."""

import inspect
import json
import typing

import numpy as np
import pytest

import kvjax
from kvjax import analysis, methods, plot
from kvjax.contract import Score
from kvjax.methods.released import easykv, factory, kvpress, papers
from kvjax.observe import Rows
from kvjax.pallas_kernels.kinds import kind_of
from tests.tools import fuzz

pytestmark = pytest.mark.usefixtures("unchecked")
IDS = {  # parameters that are whole numbers of no range of their own: ids, shapes, and what is checked with the rest
    *("eos_ids", "special", "punctuation", "tokens", "prompt", "repeat", "repeat_next", "suffix", "shape"),
    *("capacities", "markers", "layers", "budget", "curves", "heads", "top_k"),
}
DOORS = [x for modules in fuzz.MODULES.values() for m in modules for x in fuzz.entrances(m)]


def _has_bare(hint):
    """Whether an annotation allows any whole number."""
    return hint is int or (
        typing.get_origin(hint) is not typing.Annotated and any(map(_has_bare, typing.get_args(hint)))
    )


def test_every_whole_number_has_its_range():
    bare = {
        f"{name}.{n}" for name, f in DOORS for n, (hint, _) in fuzz.hints(f).items() if _has_bare(hint) and n not in IDS
    }
    assert not bare


def test_every_public_function_checks_its_arguments():
    modules = (kvjax, methods, papers, factory, kvpress, easykv, analysis, plot)
    each = [(n, x) for m in modules for n, x in vars(m).items() if getattr(x, "__module__", "").startswith(m.__name__)]
    public = {n: x for n, x in each if inspect.isfunction(x) and not n.startswith("_")}
    assert {n for n, x in public.items() if not hasattr(x, "__wrapped__")} <= {"doors"}
    assert len(public) > 150


def test_bad_values_are_refused_by_the_library_itself():
    """Some of all calls; `python -m tests.tools.fuzz` makes all of them. Nearly all functions take good values."""
    assert len([*fuzz.without_good_call()]) <= 25
    found, wrong = fuzz.table(every=7)
    total = sum((n for n in found.values()), start=type(found["plot"])())
    assert not total["silent"], wrong
    assert total["unclear"] <= 0.01 * total.total(), wrong
    assert total["clear"] > 2500


def test_what_each_public_function_refuses():
    """As recorded, by calling it, and every parameter refuses something."""
    refused = fuzz.refusals()
    assert refused == json.loads(fuzz.REFUSALS.read_text())
    parameters = {(name, n) for name, f in fuzz.entrances("") for n in fuzz.hints(f) if n != "self"}
    assert {(name, n) for name, said in refused.items() for n in said} == parameters


def test_arrays_that_do_not_fit_each_other_are_refused():
    """Of every public function: an axis of one array is twice as long as that of the same name of another."""
    tried = 0
    for _, f in DOORS:
        hints = {} if isinstance(f, type) else fuzz.hints(f)
        each = {n: (kind, *kind.any_of) for n, (hint, _) in hints.items() if (kind := kind_of(hint))}
        dims = {n: next(k.dims for k in kinds if k.dims) for n, kinds in each.items() if any(k.dims for k in kinds)}
        given = {n: fuzz.example("" if n in dims else n, h) for n, (h, needed) in hints.items() if needed or n in dims}
        for n, axes in dims.items():
            for i, axis in enumerate(axes, -len(axes)):
                if axis.isalpha() and sum(axis in other for other in dims.values()) > 1 and np.ndim(given[n]) >= -i:
                    tried += 1
                    with pytest.raises(ValueError, match=r"to fit the other arrays|keep is for 1 layers|passes="):
                        fuzz.call(f, given | {n: np.repeat(given[n], 2, i)})
    assert tried > 100


class Own(Score):
    """A user's score, whose field may be any whole number, and whose default is what it is."""

    shift: int = -3
    name: str = None

    def __call__(self, slots):
        return slots.kv.pos + self.shift


def call(f, **bad):
    """Calls a function with good values but for some."""
    return f(**{n: fuzz.example(n, hint) for n, (hint, needed) in fuzz.hints(f).items() if needed} | bad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: call(kvjax.generate, model={}), "model={} must be a model, such as models.load"),
        (lambda: call(kvjax.generate, key=5), "key=5 must be a PRNG key, such as jax.random.key"),
        (lambda: call(kvjax.generate, buckets=1), "buckets=1 must be True or False"),
        (lambda: call(kvjax.decode_step, state=None), "state=None must be a State, such as kvjax.prefill gives"),
        (lambda: call(kvjax.prefill_each, policies={"h2o": methods.h2o}), "must be a dict of which each is a Policy"),
        (lambda: call(kvjax.Session.ask, question=[3]), "question=.3. must be text, or a sequence"),
        (lambda: kvjax.partition({"a": methods.h2o(8)}, 3), "labels=3 must be a sequence"),
        (lambda: kvjax.from_fn("norm", 4), "fn='norm' must be a function"),
        (lambda: methods.headkv(8, [[np.nan, 1.0]]), "importance=.* must be finite numbers of shape"),
        (lambda: methods.snapkv(8, pooling="mean"), "pooling='mean' must be one of 'max', 'avg'"),
        (lambda: Own(shift="3"), "Own: shift='3' must be a whole number"),
        (lambda: methods.chunkkv(0.25), r"base=0.25 must be an Evict, such as kvjax.methods.h2o\(64\)"),
        (
            lambda: kvjax.chain(methods.h2o, methods.h2o(8)),
            r"policies=h2o must be a Policy.*; give what it makes, h2o\(",
        ),
        (lambda: methods.cake(24, entropy=0), "entropy=0 must be a number of 0.2 or more"),
        (lambda: methods.fastgen((1,), (2,), recovery=0), "recovery=0 must be a number above 0, at most 1"),
        (lambda: methods.think(rows=0), "rows=0 must be a whole number from 1"),
        (lambda: methods.lagkv(8, lag=np.nan), "lag=nan must be a whole number"),
        (lambda: kvjax.budgets.HeadShares(((-1.0, 1.0),) * 4), "weights=.* must be a tuple of which each"),
    ],
)
def test_errors_name_the_parameter_and_what_it_may_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_lists_of_numbers_are_arrays_and_own_fields_keep_their_defaults():
    q = np.arange(64.0).reshape(1, 2, 8, 4)
    expected = kvjax.evict_layer(methods.h2o(4), q, q, q).pos
    np.testing.assert_array_equal(kvjax.evict_layer(methods.h2o(4), q.tolist(), q.tolist(), q.tolist()).pos, expected)
    assert Own(np.int64(-7)) == Own(-7)
    asked = kvjax.from_fn(lambda kv, stats, ctx: stats[Rows()], 8, observe=[Rows()])
    assert asked.observe("prefill") == (Rows(),)


def test_annotations_that_name_what_is_not_there_leave_the_others_checked():
    """As text, where a name is imported for type checkers alone."""

    class Mine(kvjax.Evict):
        extra: "Nowhere | None" = None

    for fields, message in (({"heads": 5}, "heads=5 must be a Heads"), ({"sinks": -3}, "sinks=-3 must be a number")):
        with pytest.raises(ValueError, match=message):
            Mine(methods.h2o(8).score, 8, **fields)
