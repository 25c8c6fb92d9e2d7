"""Rows of one's own: what they become, what is wrong with those that cannot be asked, and runs on them."""

import codecs
import gzip
import json
import re
import sys
import types

import pytest

from kvjax import models
from kvjax.configs.experiment import Setup
from kvjax.experiments import run
from kvjax.experiments.core.setup import build, find_builders
from kvjax.experiments.tasks import BadRow, Task
from kvjax.experiments.tasks.rows import load_rows
from tests.runs import one_layer, samples

GOOD = {"context": "the code for ada is 7 3 . the code for milo is 5 1 .", "question": "what is the code for ada ?"}
GOOD |= {"answers": ["7 3"], "max_new_tokens": 4}


def written(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def task_of(tokenizer, limit=None):
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    return Task(encode, (tokenizer.bos_token_id,), 256, 0, "", tokenizer, limit)


def test_a_row_is_a_context_as_the_library_encodes_it_and_a_question_after_it(tmp_path, embedded):
    tokenizer = embedded[2]
    row = {**GOOD, "answers": "7 3", "answer_prefix": "the code for ada is", "id": 3, "metric": "exact_match"}
    begins = {**row, "context": tokenizer.bos_token + row["context"], "id": 4}
    rows = load_rows(written(tmp_path / "mine.jsonl", row, begins))
    assert (rows.name, len(rows)) == ("mine", 2)
    e, begun = (rows(task_of(tokenizer), i) for i in range(2))
    assert e.context == tuple(models.encode(tokenizer, row["context"]))
    assert begun.context == (tokenizer.bos_token_id, *e.context)
    (q,) = e.questions
    assert tokenizer.decode(q.ids) == f"{row['question']} {row['answer_prefix']}"
    assert (q.references, q.metric, q.max_new_tokens, dict(e.meta)["row"]) == (("7 3",), "exact_match", 4, "3")


def test_a_context_that_is_too_long_is_cut_where_it_is_wanted(tmp_path, embedded):
    tokenizer = embedded[2]
    path = written(tmp_path / "mine.jsonl", {**GOOD, "context": tokenizer.bos_token + GOOD["context"]})
    e = load_rows(path)(task_of(tokenizer), 0)
    whole, others = e.context, len(e.questions[0].ids) + 4
    task = task_of(tokenizer, others + 7)
    cut = {how: load_rows(path, truncate=how)(task, 0).context for how in ("left", "middle")}
    assert cut["left"] == (whole[0], *whole[-6:])
    assert cut["middle"] == (*whole[:3], *whole[-4:])
    for limit, said in (
        (others + 7, f"has {len(whole)} tokens, question and answer {others}, .* room for {others + 7};"),
        (others, "question and answer take"),
    ):
        with pytest.raises(BadRow, match=f"row 1: .*{said}"):
            load_rows(path)(task_of(tokenizer, limit), 0)


def test_a_chat_is_split_where_its_context_ends(tmp_path, embedded, monkeypatch):
    tokenizer = embedded[2]
    path = written(tmp_path / "mine.jsonl", GOOD)
    config = embedded[0].config
    asked = lambda how: (
        build(Setup(data=(path,), template=how), {"mine": load_rows(path)}, tokenizer, config)[0][0].example
    )
    with pytest.raises(ValueError, match="the tokenizer has no chat template; give --template raw"):
        asked("chat")
    raw = asked("auto")
    template = "{{ bos_token }}list : {% for m in messages %}{{ m.content }}{% endfor %} answer :"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    e = asked("auto")
    for wrong in ("{{ m.content | upper }}", "{{ m.content[:300] }}", "> {{ m.content | replace('\n', ' ') }}"):
        monkeypatch.setattr(tokenizer, "chat_template", template.replace("{{ m.content }}", wrong))
        with pytest.raises(ValueError, match=r"the chat template .* (the|a) message.*; give --template raw"):
            asked("auto")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert asked("raw") == raw
    assert tokenizer.decode(e.context) == f"{tokenizer.bos_token} list : {GOOD['context']}"
    assert tokenizer.decode(e.questions[0].ids) == f"{GOOD['question']} answer :"


BAD = [
    ("{nope", "no JSON: "),
    ("3", "a row is an object with fields, not 3"),
    ('{"question": "a", "question": "b"}', "the field 'question' stands there twice; leave one out"),
    ({"context": "a"}, "the field question, answers is missing"),
    ({**GOOD, "question": 3}, "question=3 must be a text"),
    ({**GOOD, "answers": []}, "references must be a list of at least one text"),
    ({**GOOD, "answers": [3]}, r"answers=\[3\] must be a text or a list of texts"),
    ({**GOOD, "answers": " "}, "a reference is blank"),
    ({**GOOD, "context": " \n"}, "the context is empty"),
    ({**GOOD, "max_new_tokens": 0}, "max_new_tokens=0 must be a whole number of at least 1"),
    ({**GOOD, "metric": "nothing"}, "no metric 'nothing'; there are exact_match"),
    ({**GOOD, "metric": "retrieval"}, "a reference must be like 'Paragraph 7'"),
    ({**GOOD, "context": "the \ud800"}, "half of a character"),
    ({**GOOD, "question": "what \udfff ?"}, "question or answer_prefix has half of a character"),
    ({**GOOD, "question": "the code " * 1100}, "question and answer take 2204 tokens, but there is room for 2048"),
    ({**GOOD, "context": "the code " * 1100}, "the context has 2200 tokens"),
    ({**GOOD, "id": 1}, "id=1 is that of line 1; give every row one of its own"),
    ({**GOOD, "id": [1]}, r"id=\[1\] must be a text or a number"),
]


@pytest.mark.slow
def test_bad_rows_are_recorded_and_named_and_the_rest_runs(tmp_path, capsys):
    """Under both protocols; a second time nothing runs, and rows that change are another run."""
    rows = [{**GOOD, "id": "1"}, *(row for row, _ in BAD), {**GOOD, "context": GOOD["context"] * 3, "id": "None"}]
    path = written(tmp_path / "mine.jsonl", *rows)
    command = ["--config", "window.py", "--model", one_layer(), "--data", path, "--budget", "0.5", "--baselines"]
    command += ["--batch-size", "2"]
    for protocol in ("in_prompt", "after_compression"):
        here = tmp_path / protocol
        options = [*command, "--protocol", protocol, "--output", str(here)]
        run.main(options)
        assert [(s["method"], s["index"]) for s in samples(here)] == [
            (m, i) for m in ("full", "window") for i in (0, 19)
        ]
        printed = capsys.readouterr().out
        said = f"18 rows could not be asked; the first, line 2: no JSON: .*; all are in {here}/bad_rows.jsonl"
        assert re.search(said, printed)
        found = [json.loads(line) for line in (here / "bad_rows.jsonl").read_text().splitlines()]
        assert [row["line"] for row in found] == [*range(2, 20)]
        for row, (_, reason) in zip(found, BAD, strict=True):
            assert re.search(reason, row["reason"]), row
    run.main(options)
    assert "is complete" in capsys.readouterr().out
    (here / "bad_rows.jsonl").write_text("#\n")
    run.main(options)
    assert len((here / "bad_rows.jsonl").read_text().splitlines()) == 18
    written(tmp_path / "mine.jsonl", *rows[:3])
    with pytest.raises(SystemExit, match=r"holds a run with another config \(tasks\.mine\.builder"):
        run.main(options)
    written(tmp_path / "mine.jsonl", *rows[1:3])
    with pytest.raises(SystemExit, match="none of 2 rows can be asked; the first, line 1: no JSON"):
        run.main([*options, "--restart"])


LINE = json.dumps(GOOD)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(LINE.encode()), r"is compressed; unpack it first \(gzip -dc < .*mine\.jsonl > rows\.jsonl\)"),
        (LINE.encode("utf-16"), "is UTF-16 or UTF-32; write it anew"),
        (LINE.encode("utf-16-be"), "is UTF-16 or UTF-32; write it anew"),
        (f"[{LINE}]".encode(), r"is one JSON value; write a line for each row \(jq -c '.\[\]'"),
        (json.dumps([GOOD], indent=1).encode(), "is one JSON value"),
    ],
)
def test_files_of_another_kind_are_named_with_the_fix(content, message, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"--data .*mine.jsonl must be JSON lines in UTF-8, .*but {message}"):
        load_rows(str(file))


def test_one_json_value_is_a_row_or_holds_them_in_a_list_or_by_name(tmp_path):
    file = tmp_path / "mine.json"
    for content, rows in ((GOOD, 1), ([GOOD, GOOD], 2), ({"a": GOOD, "b": GOOD}, 2)):
        file.write_text(json.dumps(content, indent=1))
        assert load_rows(str(file)).objects == (GOOD,) * rows


def test_a_list_among_rows_is_a_bad_row(tmp_path):
    """And the mark of UTF-8 at the front of a file is none of its first row."""
    file = tmp_path / "mine.jsonl"
    file.write_bytes(codecs.BOM_UTF8 + f"[1]\n{LINE}".encode())
    assert load_rows(str(file)).objects == ({}, GOOD)


def test_a_length_is_for_prompts_that_tasks_make():
    """So that runs over the same rows are not told apart by it."""
    with pytest.raises(ValueError, match="length=512 is for prompts that tasks make, and only data run"):
        Setup(data=("mine.jsonl",), length=512)
    assert Setup(data=("mine.jsonl",), tasks=("needle",), length=512).length == 512


def test_code_that_a_row_names_runs_only_if_the_command_line_names_it_too(tmp_path, embedded):
    ran, metric = tmp_path / "ran", f"{tmp_path}/code.py:always"
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\ndef always(output, references): return 1.0\n"
    (tmp_path / "code.py").write_text(code)
    path = written(tmp_path / "mine.jsonl", {**GOOD, "metric": metric})
    builder = lambda **options: find_builders(Setup(data=(path,), **options))["mine"]
    with pytest.raises(BadRow, match=rf"row 1: metric='{metric[:40]}.* give --metrics {metric}"):
        builder(metrics=("f1",))(task_of(embedded[2]), 0)
    assert not ran.exists()
    assert builder(metrics=(metric,))(task_of(embedded[2]), 0).questions[0].score("x") == 1.0
    assert ran.exists()


def test_data_of_the_hub_are_rows_too(monkeypatch, embedded):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets .*kvjax\[data\]"):
        load_rows("owner/name:test")
    loaded = types.SimpleNamespace(
        load_dataset=lambda name, split, trust_remote_code: (
            [GOOD, {**GOOD, "metric": "x.py:f"}]
            if (name, split, trust_remote_code) == ("owner/name", "test", False)
            else 1 / 0
        ),
    )
    monkeypatch.setitem(sys.modules, "datasets", loaded)
    rows = load_rows("owner/name:test")
    assert (rows.name, len(rows)) == ("name", 2)
    assert rows(task_of(embedded[2]), 0).questions[0].metric == "contains"
    with pytest.raises(BadRow, match=r"row 2: metric='x.py:f' is code, and runs only if"):
        rows(task_of(embedded[2]), 1)
    with pytest.raises(ValueError, match="owner/name:x cannot be loaded: ZeroDivisionError"):
        load_rows("owner/name:x")
