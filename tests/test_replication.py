"""The papers' claims: their policies, and the page that is written; `test_pages.py` decides them anew."""

import dataclasses
import gzip

import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.experiments import replication


def test_what_is_kept_early(shallow):
    """All that a window keeps is late; of the full cache half is early, as near as a prompt can be halved."""
    model, params = shallow
    prompts = [[*range(1, 41)], [*range(1, 21)]]
    assert replication.early(model, params, prompts, methods.window(8), recent=4) == [0.0, 0.0]
    assert replication.early(model, params, prompts, methods.full(), recent=4) == [0.5, 0.5]

    windows = (*[4] * (model.config.num_layers - 1), None)  # of layers that do not count
    sliding = models.LanguageModel(dataclasses.replace(model.config, sliding_window=windows))
    _, state = kvjax.prefill(sliding, params, np.array(prompts[:1]), policy=methods.h2o(12), max_new_tokens=1)
    kept = np.asarray(state.layers[-1].head_pos)
    older = kept[(kept >= 0) & (kept < 36)]
    found = replication.early(sliding, params, prompts[:1], methods.h2o(12), recent=4)
    assert found == [pytest.approx((older < 18).mean())]
    assert found[0] > 0


def test_every_claim_has_policies_and_equal_ones_run_once():
    every = replication.claims()
    assert {c.paper for c in every} == set(replication.PAPERS)
    assert min(sum(c.paper == paper for c in every) for paper in replication.PAPERS) >= 3
    made = replication.policies(every)
    experiment, called = replication.experiment(made, replication.Replication().board("embedded").setup(
        replication.PARTS["in_prompt"]))  # fmt: skip
    assert called["ahakv/nacl", "0.2"] == called["nacl/nacl", "0.2"] == "nacl-nacl"
    run = {(e.name, b): policy for e in experiment.beside for b, policy in e.policies}
    assert len({*run.values()}) == len(run)
    for name, each in made.items():
        for budget, policy in each.items():
            assert run[called[name, str(budget)], budget] == policy


def test_a_text_is_for_models_that_have_none_of_their_own():
    board = replication.Replication(text=__file__).board
    assert (board("embedded").text, board("smollm2-135m-instruct").text) == (None, __file__)
    with pytest.raises(ValueError, match=r"--text none\.txt cannot be read"):
        replication.Replication(text="none.txt")
    with pytest.raises(ValueError, match=r"no model reads some\.txt: embedded and varied have a language of their own"):
        replication.Replication(models=("embedded", "varied"), text="some.txt")
    with pytest.raises(ValueError, match=r"no claims are known of 'h2o'; there are nacl, roco, ada-kv, "):
        replication.Replication(papers=("nacl", "h2o"))


@pytest.mark.slow
def test_a_replication_is_written_and_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(replication, "CLAIMS", tmp_path / "claims.toml")
    replication.CLAIMS.write_text(
        '[[nacl]]\nsays = "more"\nwhere = "here"\na = ["nacl/h2o"]\nb = ["nacl/tova"]\nbudgets = [0.5]\n'
        '[[ahakv]]\nsays = "early"\nwhere = "there"\nkind = "early"\na = ["ahakv/h2o"]\nbudgets = [0.5]\n'
    )
    command = ["--models", "embedded", "--parts", "several_values", "perplexity", "--examples", "2", "--length", "320"]
    replication.main([*command, "--output", str(tmp_path)])
    text = (tmp_path / "replication.md").read_text()
    assert text.startswith("# Of 3 tries of 2 claims ")
    assert text.count("| more | here | embedded | ") == 2
    assert (tmp_path / "claims.png").stat().st_size > 10_000
    rows = gzip.decompress((tmp_path / "scores.csv.gz").read_bytes()).decode().splitlines()
    assert len(rows) == 1 + 3 * 2 * 2
    capsys.readouterr()
    replication.main([*command, "--output", str(tmp_path)])
    assert capsys.readouterr().out.count("is complete") == 2


@pytest.mark.parametrize(
    ("a", "b", "testable"),
    [
        ([0, 0, 0, 0.01], [0, 0, 0, 0], False),
        ([1, 1, 1, 1], [1, 1, 1, 0.99], False),
        ([0, 1, 0, 1], [0, 1, 0, 1], False),
        ([0, 1, 0, 1], [1, 0, 0, 1], True),
        ([0, 0, 0, 0], [0, 1, 0, 0], True),
    ],
)
def test_a_claim_that_no_answer_could_decide_is_untestable(a, b, testable):
    """All at a limit, or all alike; a claim on a share of the full cache's score can be decided anywhere."""
    values = {("a", "0.5"): np.array(a), ("b", "0.5"): np.array(b), ("full", "1.0"): np.ones(4)}
    scores = replication.Scores(values, False, range(4))
    claim = replication.Claim("roco", "", "", ("a",), (0.5,), ("b",))
    assert scores.testable(claim) is testable
    row = replication.Row(claim, "embedded", "in_prompt", *scores.decided(claim))
    assert (row.word == "untestable here") is not testable
    assert scores.testable(dataclasses.replace(claim, kind="keeps"))
    lost = dataclasses.replace(scores, values=values | {("full", "1.0"): np.zeros(4)})
    assert not lost.testable(dataclasses.replace(claim, kind="keeps"))
    assert lost.testable(claim) is bool(max(np.mean(a), np.mean(b)) > 0.04 and a != b)
    log = dataclasses.replace(scores, likelihoods=True)
    assert log.testable(claim) is (a != b)
