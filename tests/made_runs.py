"""Runs of the main job whose results are made up, to test what is said of them; and what lm-eval and papers leave."""

import json

TASKS = ("single_needle", "key_value", "perplexity")


def right_but_the_first(method, budget, task, index):
    return float(method == "full" or index > 0)


def make_run(
    directory,
    methods=("snapkv",),
    budgets=("0.5", "0.25"),
    tasks=TASKS,
    protocol="in_prompt",
    rows=8,
    output="12",
    lines=None,
    score_of=right_but_the_first,
    questions=1,
    shard=None,
    bad=(),
    **setup,
):
    """A finished run of the full cache and methods at budgets, whose every answer but the first is right."""
    policies = [("full", "1.0"), *((m, b) for m in methods for b in budgets)]
    options = lambda m: {} if m == "full" else {"options": "window_size=16"}
    config = {
        "name": methods[0],
        "policies": [{"method": m, "budget": b, "policy": f"{m} {b}", **options(m)} for m, b in policies],
        "setup": {"model": "embedded", "protocol": protocol, "length": 128, "examples": rows, "block": None, **setup},
        "tasks": {task: {"examples": rows, "builder": task} for task in tasks},
        "text": None,
        "checkpoint": "abc",
        "shard": shard,
    }
    made = {"command": ["python", "run.py"], "git_commit": "0123456789abcdef", "created": "today",
            "device": {"kind": "cpu", "count": 1, "cpus": 2}, "versions": {"jax": "1", "kvjax": "2"}}  # fmt: skip
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text(json.dumps({"config": config, "made": [made]}))
    (directory / "bad_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
    part, parts = shard or (1, 1)
    mine = [i for i in range(rows) if i % parts == part - 1]
    found = [
        line(m, b, task, i, question, score_of(m, b, task, i), output) | {"context": f"{task}/{i}"}
        for m, b in policies
        for task in tasks
        for i in mine
        for question in range(questions)
    ]
    (directory / "samples.jsonl").write_text("".join(json.dumps(x) + "\n" for x in found[:lines]))
    return directory


def line(method, budget, task, index, question, score, output):
    share = min(1.0, float(budget)) if budget.replace(".", "").isdecimal() else 0.6
    key = {"method": method, "budget": budget, "task": task, "index": index, "question": question, "id": "x"}
    costs = {"prompt_tokens": 100, "live": 100 * share, "most_live": 100 * share + 2, "slots": round(64 * share),
             "kv_bytes": round(1000 * share), "prefill_peak_bytes": 2**21, "decode_peak_bytes": None,
             "prefill_seconds": 0.5 + index // 4, "decode_tokens_per_second": 40.0 * (1 + index // 4)}  # fmt: skip
    if task.startswith("perplexity"):
        return key | costs | {"nll": 1 + index / 10 + (method != "full"), "tokens": 10}
    metric = {"key_value": "f1"}.get(task, "contains")
    answer = {"score": score, "metric": metric, "output": output, "references": ["12"], "tokens": 2}
    return key | costs | answer | {"depth": (index % 2) / 2, "length": 64.0 * (1 + index // 4)}


def make_lm_eval(directory, policy, values):
    """What lm-eval writes of one task with lines, under two names of one metric, and one without; of its own model if
    there is no policy."""
    directory.mkdir(exist_ok=True)
    given = {"pretrained": "/models/small", "policy": policy, **({} if policy == "full" else {"budget": 0.25})}
    ours = {"model": "kvjax", "model_args": given, "kvjax": {"policy": policy, "block": None, "seed": 0}}
    content = {
        "results": {
            "trec": {"alias": "trec", "score,none": 0.5, "score_stderr,none": 0.1},
            "wikitext": {"word_perplexity,none": 12.5, "word_perplexity_stderr,none": "N/A"},
            "group": {"score,none": 0.5},
        },
        "group_subtasks": {"group": ["trec"], "trec": []},
        "config": ours if policy else {"model": "hf", "model_args": "pretrained=/models/small,dtype=float32"},
    }
    stamp = f"2026-01-0{1 + (policy == 'full')}"
    (directory / f"results_{stamp}.json").write_text(json.dumps(content))
    lines = [
        {"doc_id": i, "prompt_hash": str(i), "filter": "none", "metrics": ["score", "f1"], "score": v, "f1": v,
         "target": ["yes"], "filtered_resps": ["no"]}
        for i, v in enumerate(values)
    ]  # fmt: skip
    (directory / f"samples_trec_{stamp}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_paper(directory):
    """What a reduced run of a paper's table leaves."""
    directory.mkdir(parents=True)
    numbers = [{"method": "roco", "budget": 0.5, "column": "R-1", "rows": 4, "ours": 41.25, "low": 40, "high": 42,
                "theirs": 43.5}]  # fmt: skip
    content = {"entry": "roco/table4", "status": "machinery only", "reduced": ["4 rows"], "numbers": numbers}
    (directory / "report.json").write_text(json.dumps(content))
    (directory / "manifest.json").write_text(json.dumps({"config": {}, "made": [{"created": "then"}]}))
    for name in ("samples.jsonl", "report.md"):
        (directory / name).write_text("")
