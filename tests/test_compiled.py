import jax
import pytest

from kvjax.experiments.core.compiled import OPTION, keep_compiled

OPTIONS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache"


@pytest.fixture
def untold(monkeypatch, tmp_path):
    """jax without a directory for compiled programs, and a cache directory of the user's."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    for name in OPTIONS:
        monkeypatch.delenv(name.upper(), raising=False)
    jax.config.update(OPTIONS[0], None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def settings():
    return tuple(getattr(jax.config, name) for name in OPTIONS)


def test_programs_are_kept_in_the_users_directory(untold):
    assert keep_compiled(["--config", "a.py"]) == ["--config", "a.py"]
    assert settings() == (str(untold / "kvjax" / "compiled"), 0.1, True)
    assert (untold / "kvjax" / "compiled").is_dir()


def test_an_option_says_to_keep_none(untold):
    assert keep_compiled(["--config", OPTION, "a.py"]) == ["--config", "a.py"]
    assert settings()[::2] == (None, False)
    assert not list(untold.iterdir())


def test_what_jax_was_told_stays():
    before = settings()
    assert before[0]
    assert keep_compiled([]) == []
    assert settings() == before


def test_a_directory_that_cannot_be_made_does_not_end_a_run(untold, capsys):
    (untold / "kvjax").write_text("a file")
    assert keep_compiled([]) == []
    assert settings()[0] is None
    assert f"programs are not kept: {untold / 'kvjax' / 'compiled'}: Not a directory" in capsys.readouterr().err


def test_help_names_the_option(untold, capsys):
    keep_compiled(["--help"])
    assert OPTION in capsys.readouterr().out
