"""Every config: its policies fit the embedded model, and decode past a full budget within the plan."""

import inspect
import pathlib
import re
import sys

import numpy as np
import pytest

import kvjax
from kvjax import Share, configs, methods
from kvjax.budgets import Combined
from kvjax.configs import loading
from kvjax.configs.experiment import Experiment, Setup
from kvjax.configs.learning import LearnedBudget, LearnedScorer, Prompts

README = pathlib.Path(configs.__file__).parents[1] / "experiments" / "bench_results" / "board" / "README.md"
WANTED = """full random window dilated_window streaming_llm key_attention h2o scissorhands tova mas roco nacl snapkv
pyramidkv ada_snapkv ada_pyramid ahakv keyformer fastgen knorm keydiff expected_attention lagkv criticalkv chunkkv
think aqas curdkv q_filters r_kv compactor defensivekv layer_defensivekv cake lava finch simlayerkv headkv
kvzip kvzap quest duo_attention capkv random_attention
dropkv vase lazy_eviction triattention entropy_chunkkv kvcompose""".split()


def test_all_methods_have_a_config():
    assert sorted(WANTED) == configs.available()
    for name in WANTED:
        assert callable(getattr(methods, name))


@pytest.mark.parametrize("name", WANTED)
def test_config(name, embedded):
    model, _, _ = embedded
    experiment = configs.find(f"{name}.py")[1]()
    assert isinstance(experiment, Experiment)
    assert experiment.name == name
    assert experiment == configs.find(name)[1]()
    for _, policy in experiment.policies:
        plan = kvjax.make_plan(model.config, policy, np.array([400, 1024]), 1024, 64)
        assert min(plan.capacities) > 0


NEEDING_MORE = ("duo_attention", "fastgen", "headkv", "kvzap", "kvzip", "q_filters", "triattention")


@pytest.mark.parametrize("name", [n for n in WANTED if n not in (*NEEDING_MORE, "full")])
def test_a_config_names_the_options_that_its_method_would_need(name):
    """The method, called with them, is the policy; what labels of sweeps say aside."""
    experiment = configs.find(name)[1]()
    options = eval(f"dict({experiment.options})")
    if name == "random_attention":
        first = Combined("sum", (1.0, 0.5))
    elif name in ("chunkkv", "criticalkv", "entropy_chunkkv"):
        first = methods.snapkv(0.5, window=options.pop("window"))
    else:
        first = {"think": 0.25, "simlayerkv": 0.9}.get(name, 0.5)
    assert experiment.policies[0][1] == getattr(methods, name)(first, **options)


def test_options_are_the_parameters_of_the_method():
    """Of budgets as shares, of files, of what only Python can give, of switches; and their help."""
    make = lambda name, **options: configs.find(name)[1](**options).policies[0][1]
    assert make("roco", scope_share=0.25) == methods.roco(0.5, scope=Share(0.25))
    assert configs.find("aqas")[1](recent_share=0.25).options == "recent=Share(share=0.25)"
    assert make("nacl", recent=4, proxies=0.1) == methods.nacl(0.5, recent=4, proxies=0.1)
    assert make("keyformer", shared=True) == kvjax.shared_layers(methods.keyformer(0.5))
    assert make("compactor", blend=0.1, sketch=None) == methods.compactor(0.5, blend=0.1, sketch=None)
    assert [*inspect.signature(configs.find("kvzip")[1]).parameters][:2] == ["budget", "chunk"]
    assert "\n  recent: first and last tokens that stay" in configs.find("compactor")[1].__doc__
    with pytest.raises(TypeError, match="snapkv has no option window_size; there are budget, window, kernel, pooling"):
        make("snapkv", window_size=3)
    with pytest.raises(ValueError, match="streaming is empty; give at least one"):
        make("duo_attention", streaming=())


def test_the_readme_has_every_config_whose_options_are_not_the_defaults():
    found = {name: configs.find(name)[1]().options for name in WANTED}
    (line,) = [x for x in README.read_text().splitlines() if "are not the defaults of `kvjax.methods`" in x]
    written = dict(re.findall(r"`(\w+)\(([^`]*)\)`", line))
    assert written == {name: options for name, options in found.items() if options}
    assert configs.find("snapkv")[1](window=32).options == ""


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        *((Setup, each) for each in ({"protocol": "x"}, {"tasks": (3,)}, {"examples": True}, {"block": 2.0})),
        *((Experiment, each) for each in ({"name": 3}, {"policies": ((8, "h2o"),)}, {"setup": 1})),
        (Prompts, {"seed": None}),
        *((LearnedBudget, each) for each in ({"family": "both"}, {"temperature": (1.0,)})),
        (LearnedScorer, {"rate": "fast"}),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_a_config_returns_has_fields_of_their_types(kind, given):
    family = configs.find("learned_budget", "learn budget")[1]().family
    needed = {
        Experiment: {"name": "x", "policies": ((8, methods.window(8)),)},
        LearnedBudget: {"name": "x", "method": methods.snapkv, "budgets": (0.25,), "family": family},
        LearnedScorer: {"name": "x", "budgets": (0.25,)},
    }
    (name,) = given
    kind(**needed.get(kind, {}))
    with pytest.raises(ValueError, match=f"{name}=.* is not of the type "):
        kind(**needed.get(kind, {}) | given)


def test_files_elsewhere_import_those_beside_them_whenever_their_code_runs(tmp_path, monkeypatch):
    (tmp_path / "size_of_mine.py").write_text("SIZE = 7\n")
    (tmp_path / "mine.py").write_text(
        "def make(budget):\n    from size_of_mine import SIZE\n\n    return budget * SIZE\n\n\nget_config = make\n"
    )
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    assert loading.function("mine.py:make")(2) == configs.find("./mine.py")[1](3) - 7 == 14
    assert sys.path == path
    assert configs.find("configs/h2o.py")[0] == "h2o"  # from anywhere
    with pytest.raises(ValueError, match=r"'mine.py' names no function; write path.py:name"):
        loading.function("mine.py")


array = lambda x: lambda f: np.save(f, x)
arrays = lambda **named: lambda f: np.savez(f, **named)


@pytest.mark.parametrize(
    ("config", "option", "write", "message"),
    [
        (
            "headkv",
            "importance",
            None,
            "there is no .*file; make one: python experiments/probe.py heads --model embedded",
        ),
        ("kvzap", "function", lambda f: f.write(b"PK"), "file is no file of numpy's arrays"),
        ("headkv", "importance", array(np.array("x")), "'heads' of <U1 that are no finite floats"),
        (
            "headkv",
            "importance",
            array(np.ones((4, 4, 8))),
            r"importance=float64.4, 4, 8. must be finite numbers of shape \(L, K\)",
        ),
        ("headkv", "importance", array(np.ones((3, 4))), r"\(3, 4\), but embedded has 4 layers of 4 kv"),
        ("duo_attention", "gates", array(np.ones((4, 2))), r"\(4, 2\), but embedded has 4 layers of 4"),
        ("q_filters", "filters", arrays(a=np.ones(3)), "has 1 arrays, but filters are one"),
        ("kvzap", "function", array(np.ones(3)), r"has one array of the shape \(3,\)"),
        ("kvzap", "function", arrays(out=np.ones((4, 128, 4))), "has the weights"),
        ("kvzap", "function", arrays(out=np.ones((3, 128, 4))), r"\(3, 128, 4\), but embedded has 4"),
        ("expected_attention", "queries", arrays(mean=np.full(3, np.nan)), "'mean' of float64 that are no"),
        ("duo_attention", "gates", "{}", "file.json has no 'gates'; give what experiments/learn.py gates wrote"),
        ("duo_attention", "gates", "{", "file.json is no file of JSON that can be read"),
        ("duo_attention", "gates", '{"gates": [[1, 1]]}', r"file.json is of shape \(1, 2\), but embedded has 4 layers"),
    ],
)
def test_what_was_found_of_a_model_is_read_or_refused_by_its_file(tmp_path, config, option, write, message):
    """Text is that of a file of JSON."""
    file = tmp_path / ("file.json" if isinstance(write, str) else "file")
    if isinstance(write, str):
        file.write_text(write)
    elif write is not None:
        with file.open("wb") as f:
            write(f)
    with pytest.raises(ValueError, match=message):
        configs.find(config)[1](**{option: str(file)})


def test_gates_are_given_where_none_lie_beside_the_model():
    with pytest.raises(ValueError, match=r"there is no models/gates\.npy; gates are learned for a model with kvjax\.l"):
        configs.find("duo_attention")[1](setup=Setup(model="models"))
