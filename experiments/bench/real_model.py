"""What a published model costs beside transformers: prefill, decoding, the first answer, and peak memory.

    python -m kvjax.experiments.bench.real_model
    python -m kvjax.experiments.bench.real_model --model DIR --dtypes bfloat16 --lengths 1024

Both load the same weights in processes of their own and are asked in turns, so that they meet the same machine. Needs
torch, and Linux for the peak.
"""

import argparse
import importlib.metadata
import inspect
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

START = time.perf_counter()
STEPS = 32


class Kvjax:
    """kvjax: a method reads the prompt, and decodes."""

    def __init__(self, path: str, dtype: str):
        import jax

        from kvjax import models

        self._jax, self._prefills = jax, {}
        self.model, self.params = models.load(path, dtype=dtype)

    def read(self, ids: Any, method: str) -> Any:
        """Logits and the state after a prompt."""
        import kvjax
        from kvjax import methods

        policy = methods.full() if method == "full" else getattr(methods, method)(0.25)
        prefill = lambda params, ids: kvjax.prefill(self.model, params, ids, policy=policy, max_new_tokens=STEPS)
        found = self._prefills.setdefault((ids.shape, method), self._jax.jit(prefill))(self.params, ids)
        return self._jax.block_until_ready(found)

    def decode(self, read: Any) -> None:
        """Greedy steps."""
        import kvjax

        if not hasattr(self, "_decode"):
            options = {"max_new_tokens": STEPS, "eos_ids": ()}
            self._decode = self._jax.jit(lambda p, *read: kvjax.generate_from(self.model, p, *read, **options).tokens)
        self._jax.block_until_ready(self._decode(self.params, *read))


class Transformers:
    """transformers with torch, its full cache and scaled-dot-product attention."""

    def __init__(self, path: str, dtype: str):
        import torch
        import transformers

        self._torch = torch
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(path, dtype=getattr(torch, dtype)).eval()
        forward = inspect.signature(self.model.forward).parameters
        self._cache = "cache" if "cache" in forward else "past_key_values"

    def read(self, ids: Any, method: str) -> Any:
        """What the model gives for a prompt."""
        del method
        with self._torch.inference_mode():
            return self.model(self._torch.tensor(ids), use_cache=True, logits_to_keep=1)

    def decode(self, read: Any) -> None:
        """Greedy steps."""
        with self._torch.inference_mode():
            for _ in range(STEPS - 1):
                token = read.logits[:, -1:].argmax(-1)
                read = self.model(token, use_cache=True, **{self._cache: read[self._cache]})


SIDES = {"kvjax": Kvjax, "transformers": Transformers}


def worker(side: str, path: str, dtype: str) -> None:
    """Answers jobs (what, tokens, method) of standard input with seconds, or bytes."""
    import numpy as np

    model = SIDES[side](path, dtype)
    for line in sys.stdin:
        what, tokens, method = json.loads(line)
        ids = np.random.default_rng(tokens).integers(3, 1000, (1, tokens)).astype(np.int32)
        found = None
        if what == "peak":
            status = pathlib.Path("/proc/self/status").read_text()
            found = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        else:
            start = time.perf_counter()
            read = model.read(ids, method)
            if what == "first answer":
                found = time.perf_counter() - START
            elif what == "prefill":
                found = time.perf_counter() - start
            else:
                start = time.perf_counter()
                model.decode(read)
                found = (time.perf_counter() - start) / (STEPS - 1)
        print(json.dumps(found), flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/real_model.json"))
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(*options.worker)

    import numpy as np

    from kvjax.experiments.core.command import write_json
    from kvjax.models import sources

    path, rows = str(sources.locate(options.model)), []
    versions = {name: importlib.metadata.version(name) for name in ("jax", "torch", "transformers")}
    about = {"model": options.model, "rounds": options.rounds, "cores": os.cpu_count(), "versions": versions}
    for dtype in options.dtypes:
        asked = [("first answer", options.lengths[0], "full")]
        asked += [("prefill", n, "full") for n in options.lengths]
        asked += [("decode", n, method) for n in options.lengths for method in ("full", "snapkv")] + [
            ("peak", 0, "full")
        ]
        command = [sys.executable, "-m", "kvjax.experiments.bench.real_model", "--worker"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running: dict[str, Any] = {}
        try:
            for what, tokens, method in asked:
                times: dict[str, list[float]] = {side: [] for side in SIDES if side == "kvjax" or method == "full"}
                for _ in range(1 if what in ("first answer", "peak") else options.rounds + 1):
                    for side, seconds in times.items():
                        if side not in running:  # the first answer counts from here
                            running[side] = subprocess.Popen([*command, side, path, dtype], **pipes)
                        process = running[side]
                        process.stdin.write(json.dumps([what, tokens, method]) + "\n")
                        process.stdin.flush()
                        seconds.append(json.loads(process.stdout.readline()))
                warm = {side: found[1:] or found for side, found in times.items()}  # the first compiles
                row = {"dtype": dtype, "what": what, "tokens": tokens, "method": method}
                rows.append(row | {side: [float(np.median(x)), float(min(x))] for side, x in warm.items()})
                print(json.dumps(rows[-1]), flush=True)
                write_json(options.output, {"about": about, "rows": rows})  # what is measured stays
        finally:
            for process in running.values():
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
