"""Pictures show what they are given: where it is, and how much of it."""

import dataclasses
import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from kvjax import analysis, plot
from kvjax.analysis import Interval
from kvjax.contract import EMPTY, Decision, LayerInfo, Policy
from kvjax.plot.style import columns_for, wrapped
from kvjax.run.state import State
from kvjax.storage import empty

T = 12
RNG = np.random.default_rng(0)
KEEP = RNG.random((3, 2, T)) < 0.4  # layers, heads, tokens
KEEP[:, :, -1] = True
SCORE = RNG.random((3, 2, T))


def decisions(padding=0):
    """The masks as decisions about a batch of two, behind padding, of which the second row keeps everything."""
    pad = ((0, 0), (padding, 0))
    both = lambda x, fill, other: jnp.asarray(np.stack([np.pad(x, pad, constant_values=fill), np.pad(other, pad)]))
    return [
        Decision(both(k, False, np.ones_like(k)), both(s, -np.inf, s), jnp.full((2, 2), T))
        for k, s in zip(KEEP, SCORE, strict=True)
    ]


def positions():
    return [np.where(k, np.arange(T), EMPTY)[:, ::-1] for k in KEEP]


def layers():
    info = LayerInfo(0, 3, 2, 2, 4, T, 0)
    return tuple(empty(info, Policy(), 1, jnp.float32, T).replace(pos=jnp.asarray(p)[None]) for p in positions())


def state():
    one = jnp.asarray([T])
    return State(layers(), one, one, jax.random.key(0)[None], one, ((),) * 3)


def image(figure, panel=0):
    return np.asarray(figure.axes[panel].images[0].get_array())


@pytest.mark.parametrize("kept", [KEEP, jnp.asarray(KEEP), positions(), layers(), state(), decisions(), decisions(3)])
def test_every_form_of_what_is_kept_is_one_picture(kept):
    figure = plot.kept_positions(kept)
    np.testing.assert_array_equal(image(figure), KEEP.reshape(6, T))
    ticks = figure.axes[0].get_yticks(), [t.get_text() for t in figure.axes[0].get_yticklabels()]
    np.testing.assert_array_equal(ticks[0], [0.5, 2.5, 4.5])
    assert ticks[1] == ["0", "1", "2"]
    assert f"{100 * KEEP.mean():.3g} %" in [t.get_text() for t in figure.axes[0].texts]


def test_kept_positions_of_several_policies_layers_and_rows():
    kept = {"some": decisions(), "all": [np.ones((2, T), bool)] * 3}
    figure = plot.kept_positions(kept, layers=[2, 0], markers={"needle": range(3, 5), "ends": [0, T - 1]})
    np.testing.assert_array_equal(image(figure), KEEP[[2, 0]].reshape(4, T))
    assert [t.get_text() for t in figure.axes[1].get_yticklabels()] == ["2", "0"]
    assert [a.get_ylabel() for a in figure.axes] == ["some", "all"]
    for axes in figure.axes:
        spans = sorted((p.get_x(), p.get_x() + p.get_width()) for p in axes.patches)
        assert spans == [(-0.5, 0.5), (2.5, 4.5), (T - 1.5, T - 0.5)]
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["held", "needle", "ends"]
    assert image(plot.kept_positions(decisions(), row=1)).all()
    assert image(plot.kept_positions(positions(), length=20)).shape == (6, 20)
    many = plot.kept_positions([np.ones((1, T), bool)] * 30)
    assert [t.get_text() for t in many.axes[0].get_yticklabels()] == [str(i) for i in range(0, 30, 4)]


def test_scores_stand_at_their_positions():
    chosen = decisions(2)
    figure = plot.scores(chosen, layers=[1], head=1, markers={"needle": 4})
    goes, stays = (c.get_offsets() for c in figure.axes[0].collections)
    np.testing.assert_allclose(stays, np.stack([np.nonzero(KEEP[1, 1])[0], SCORE[1, 1][KEEP[1, 1]]], -1), rtol=1e-6)
    assert len(goes) == (~KEEP[1, 1]).sum()
    assert len(plot.scores(chosen).axes) == 3
    protected = dataclasses.replace(chosen[0], score=chosen[0].score.at[..., -1].set(-jnp.inf))
    x, y = plot.scores(protected).axes[0].lines[0].get_data()
    assert (list(x), list(y)) == ([T - 1], [0.0])  # at the edge
    wide = dataclasses.replace(chosen[0], score=jnp.where(chosen[0].score > 0.9, 1e3, chosen[0].score))
    assert plot.scores(wide).axes[0].get_yscale() == "log"
    assert plot.scores(wide, yscale="symlog").axes[0].get_yscale() == "symlog"


CURVES = {
    "a": {0.5: Interval(90.0, 85.0, 95.0), 0.125: Interval(50.0, 40.0, 60.0)},
    "b": {0.125: Interval(52.0, 41.0, 63.0)},
    "c": {0.3: 70.0},
}


def test_a_full_cache_whose_interval_has_no_bounds_is_a_line():
    """That of a single prompt's perplexity."""
    figure = plot.budget_curve(CURVES, full=Interval(6.5, 0.0, math.inf))
    figure.savefig(io.BytesIO())
    assert "full cache" in figure.axes[0].get_legend_handles_labels()[1]


def test_every_point_stands_at_its_budget_and_intervals_that_overlap_differ():
    figure = plot.budget_curve(CURVES, full=Interval(99.0, 98.0, 100.0), ylabel="score")
    axes = figure.axes[0]
    lines = {c.get_label(): c.lines for c in axes.containers}
    for name, points in CURVES.items():
        x, y = lines[name][0].get_data()
        np.testing.assert_allclose(x, sorted(100 * b for b in points))
        assert set(y) == {p.mean if isinstance(p, Interval) else p for p in points.values()}
    segments = lines["a"][2][0].get_segments()
    np.testing.assert_allclose([s[:, 1] for s in segments], [[40, 60], [85, 95]])
    assert not lines["c"][2]  # a number without an interval
    widths = [lines[name][2][0].get_linewidth()[0] for name in "ab"]
    caps = [lines[name][1][0].get_markersize() for name in "ab"]
    assert widths[0] > widths[1]
    assert caps[0] > caps[1]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("score", "budget, % of the prompt")
    assert [t.get_text() for t in axes.get_xticklabels()] == ["12.5", "30", "50"]
    assert "full cache" in [t.get_text() for t in axes.get_legend().get_texts()]


def test_what_would_lie_over_one_another_gets_panels():
    crowded = {name: {64: Interval(5.0, 4.0, 6.0 + i)} for i, name in enumerate("abcd")}
    figure = plot.budget_curve(crowded)
    assert [a.get_title() for a in figure.axes] == list("abcd")
    assert all(len(a.containers) == 1 for a in figure.axes)
    assert figure.axes[0].get_xlabel() == "budget, tokens a kv head"
    assert len(plot.budget_curve(crowded, several=False).axes) == 1
    assert len(plot.budget_curve(CURVES, several=True).axes) == 3
    assert len(plot.budget_curve({str(i): {8: 1.0} for i in range(9)}).axes) == 9


def test_curves_of_the_analysis():
    shape = (1, 2, 3)  # policies, budgets, prompts
    of_layers = {f.name: jnp.zeros((1, 2, 1, 3)) for f in dataclasses.fields(analysis.Losses)}
    of_models = {name: jnp.asarray(RNG.random(shape)) for name in ("kl", "agreement", "regret_layers")}
    losses = analysis.Losses(**of_layers | of_models)
    found = analysis.Curves(losses, ("h2o",), (16, 32))
    axes = plot.budget_curve(found).axes[0]
    np.testing.assert_allclose(axes.containers[0].lines[0].get_ydata(), found["kl"].mean[0])
    assert axes.get_ylabel() == "kl"


NEEDLES = [
    {"depth": d, "length": n, "score": float(d > 0.5), "task": "single_needle"}
    for d in (0.0, 0.25, 0.75, 1.0)
    for n in (100, 200)
]


def test_needles_by_depth_and_length():
    some = [*NEEDLES, {"depth": 1.0, "length": 200, "score": 0.0}, {"depth": 0.25, "length": 300, "score": 1.0}]
    figure = plot.depth_against_length({"all": NEEDLES, "some": some})
    np.testing.assert_array_equal(
        image(figure), [[0, 0, np.nan], [0, 0, np.nan], [100, 100, np.nan], [100, 100, np.nan]]
    )
    np.testing.assert_array_equal(image(figure, 1)[[1, 3]], [[0, 0, 100], [100, 50, np.nan]])
    counts = {(t.get_position()): t.get_text() for t in figure.axes[1].texts}
    assert counts[1, 3] == "1/2"
    assert counts[2, 1] == "1/1"
    assert (2, 0) not in counts
    banded = plot.depth_against_length({"some": some}, depths=2, lengths=2)
    np.testing.assert_array_equal(image(banded), [[0, 100], [80, np.nan]])
    assert [t.get_text() for t in banded.axes[0].get_yticklabels()] == ["0 to 50", "50 to 100"]
    assert [t.get_text() for t in banded.axes[0].get_xticklabels()] == ["100 to\n200", "300"]


DRAW = {
    "kept_positions": lambda axes: plot.kept_positions({"a": KEEP, "b": KEEP}, axes=axes),
    "scores": lambda axes: plot.scores(decisions()[:2], axes=axes),
    "budget_curve": lambda axes: plot.budget_curve({"a": {8: 1.0}, "b": {8: 1.0}}, several=True, axes=axes),
    "depth_against_length": lambda axes: plot.depth_against_length({"a": NEEDLES, "b": NEEDLES}, axes=axes),
}


@pytest.mark.parametrize("name", DRAW)
def test_drawing_in_axes_of_ones_own(name):
    figure = Figure()
    grid = figure.subplots(3, 1)
    assert DRAW[name](grid[1:]) is figure
    assert not grid[0].has_data()
    assert all(axes.has_data() for axes in grid[1:])
    with pytest.raises(ValueError, match="axes has 3 elements, but 2 panels are drawn"):
        DRAW[name](grid)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot.kept_positions({}), "there is nothing to draw; give at least one policy"),
        (lambda: plot.kept_positions([]), "there is nothing to draw: 0 of 0 layers"),
        (lambda: plot.scores(decisions(), layers=[]), "there is nothing to draw: 0 of"),
        (lambda: plot.kept_positions(KEEP, layers=[3]), "layers=3 must be .* from 0 to 2; there are 3 layers"),
        (lambda: plot.kept_positions(KEEP, markers={"x": T}), f"the prompt has {T} positions"),
        (lambda: plot.kept_positions(positions(), length=5), "length=5, but position 11 is held"),
        (lambda: plot.kept_positions(decisions(), row=2), "row=2 must be .*; there are 2 sequences"),
        (lambda: plot.kept_positions({"x": KEEP[0]}), r"what x keeps must be a mask .*; got bool of shape \(12,\)"),
        (lambda: plot.scores(decisions(), head=2), "head=2 must be .*; there are 2 heads"),
        (lambda: plot.budget_curve({"x": {}}), "x has no budgets; leave it out"),
        (lambda: plot.budget_curve({"x": {0: 1.0}}), "x has the budget 0, but it must be positive"),
        (lambda: plot.budget_curve({"x": {64: 1.0, 0.5: 1.0}}), "budgets of 64 tokens and of a share 0.5 have no axis"),
        (lambda: plot.depth_against_length({"x": []}), "x has no needles"),
        (lambda: plot.depth_against_length({"x": [{"depth": 0.5}]}), "the needles of x need numbers under .*'length'"),
        (
            lambda: plot.depth_against_length({"x": [NEEDLES[0] | {"score": 40}]}),
            r"has score 40, but it lies in \[0, 1\]",
        ),
    ],
)
def test_what_cannot_be_drawn_is_named(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_names_are_wrapped_and_cut_off():
    assert wrapped("snapkv, 12.5 %") == "snapkv, 12.5 %"
    lines = wrapped("a name of a run with all of its options-and-more-of-them", 12, 2).splitlines()
    assert [len(line) <= 12 for line in lines] == [True, True]
    assert lines[1].endswith("…")
    assert [columns_for(n) for n in (1, 2, 3, 5, 6, 7, 9, 10)] == [1, 2, 3, 5, 3, 4, 3, 5]
