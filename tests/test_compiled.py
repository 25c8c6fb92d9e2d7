import pathlib

import jax
import pytest

import kvjax
from kvjax import models
from kvjax.experiments.core.compiled import OPTION, read_cache_option
from kvjax.models.embedded import EMBEDDED

OPTIONS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache"


@pytest.fixture
def untold(monkeypatch, tmp_path):
    """jax without a directory for compiled programs, and a cache directory of the user's."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    for name in OPTIONS:
        monkeypatch.delenv(name.upper(), raising=False)
    jax.config.update(OPTIONS[0], None)
    monkeypatch.delenv("KVJAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    kvjax.run.compiled.reset_cache()


def settings():
    return tuple(getattr(jax.config, name) for name in OPTIONS)


def test_programs_are_kept_in_the_users_folder(untold):
    assert kvjax.keep_compiled() == untold / "kvjax" / "compiled"
    assert settings()[::2] == (str(untold / "kvjax" / "compiled"), True)
    assert settings()[1] < 1


def test_a_folder_takes_what_is_compiled_from_then_on(untold, monkeypatch):
    monkeypatch.setattr(kvjax.run.compiled, "_LEAST", 0)
    kvjax.keep_compiled(untold / "a")
    jax.jit(lambda x: x * 2 + 1)(1.0)
    jax.config.update("jax_enable_compilation_cache", False)
    kvjax.keep_compiled(untold / "b")
    jax.jit(lambda x: x * 3 + 1)(1.0)
    assert list((untold / "a").iterdir())
    assert list((untold / "b").iterdir())


def test_what_jax_was_told_stays():
    before = settings()
    assert kvjax.keep_compiled() == pathlib.Path(before[0])
    assert settings() == before


def test_nothing_is_kept_where_jax_was_told_so(untold):
    jax.config.update("jax_enable_compilation_cache", False)
    assert kvjax.keep_compiled() is None
    assert not list(untold.iterdir())


def test_a_folder_that_cannot_be_made(untold):
    (untold / "file").write_text("a file")
    with pytest.raises(ValueError, match=r"cannot be kept in .*file/below: Not a directory; set JAX_COMPILATION"):
        kvjax.keep_compiled(untold / "file" / "below")
    assert settings()[0] is None


@pytest.mark.parametrize("folder", ["", "gs://bucket/programs"])
def test_what_is_no_local_folder(untold, folder):
    with pytest.raises(ValueError, match="is no local folder; give its path"):
        kvjax.keep_compiled(folder)
    with pytest.raises(ValueError, match="cannot be kept in"):
        kvjax.keep_compiled("a\0b")
    assert settings()[0] is None


def test_a_home_directory_is_found(untold, monkeypatch):
    monkeypatch.setenv("HOME", str(untold))
    assert kvjax.keep_compiled("~/programs") == untold / "programs"


def test_a_session_keeps_programs_or_warns_that_it_cannot(untold):
    model, params = models.load(EMBEDDED)
    make = lambda: kvjax.Session(model, params, models.load_tokenizer(EMBEDDED), max_new_tokens=2)
    (untold / "kvjax").write_text("a file")
    with pytest.warns(UserWarning, match="cannot be kept in .*: Not a directory"):
        make()
    (untold / "kvjax").unlink()
    make()
    assert settings()[0] == str(untold / "kvjax" / "compiled")


def test_scripts_have_an_option_to_keep_none(untold):
    assert read_cache_option(["--config", OPTION, "a.py"]) == ["--config", "a.py"]
    assert settings()[::2] == (None, False)


def test_scripts_keep_programs_or_say_that_they_do_not(untold, capsys):
    (untold / "kvjax").write_text("a file")
    assert read_cache_option(["a.py"]) == ["a.py"]
    assert f"cannot be kept in {untold / 'kvjax' / 'compiled'}: Not a directory" in capsys.readouterr().err
    (untold / "kvjax").unlink()
    read_cache_option([])
    assert settings()[0] == str(untold / "kvjax" / "compiled")
