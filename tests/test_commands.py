"""The command `kvjax` and those that it names."""

import contextlib
import importlib
import re
import subprocess
import sys

import pytest

import kvjax.__main__ as program
from kvjax.experiments.core.compiled import OPTION


@pytest.mark.parametrize("name", program.COMMANDS)
@pytest.mark.parametrize("called", ["kvjax", "run.py"])
def test_help_begins_with_usage_and_names_what_was_typed(name, called, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"/somewhere/{called}"])
    main = importlib.import_module(f"kvjax.experiments.{name}").main
    with contextlib.suppress(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: {f'kvjax {name}' if called == 'kvjax' else f'experiments/{name}.py'} ")
    assert OPTION in said or name == "report"  # which compiles nothing


@pytest.mark.parametrize("name", ["run", "board", "replication"])
def test_a_number_of_examples_is_not_a_limit(name):
    with pytest.raises(SystemExit, match=r"there is no --limit; --examples says how many"):
        importlib.import_module(f"kvjax.experiments.{name}").main(["--config", "snapkv.py", "--limit", "3"])


def test_kvjax_lists_its_commands_and_names_the_nearest(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvjax"])
    program.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == [*program.COMMANDS]
    for typed, said in (("reprot", "is it report?"), ("xyz", "kvjax lists them")):
        monkeypatch.setattr(sys, "argv", ["kvjax", typed])
        with pytest.raises(SystemExit, match=said):
            program.main()


def test_importing_kvjax_takes_no_signal_over():
    code = "import signal, kvjax; print(*map(signal.getsignal, signal.valid_signals()), signal.set_wakeup_fd(-1))"
    with_kvjax, without = (
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for text in (code, code.replace("kvjax", "json"))
    )
    assert re.sub("0x[0-9a-f]+", "", with_kvjax) == re.sub("0x[0-9a-f]+", "", without)
