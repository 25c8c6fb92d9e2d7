"""What codecs of keys and values cost a model in likelihood, beside the bits that they take.

    python -m kvjax.experiments.bench.codecs --text wikitext-2-test.txt

Every passage's first tokens are a prompt, which is read exactly; all later rows read codes, of their own tokens, too.
Perplexity is of these rows. Bits are those of a stored number, scales and means included. Evicts nothing.
"""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import models
from kvjax.analysis import interval
from kvjax.codecs import Codec, Float8, Int8, RowCodec, TurboQuant, Uniform
from kvjax.configs.experiment import check_whole
from kvjax.experiments.core.command import check_output, script
from kvjax.experiments.core.provenance import write_found

FOUR = TurboQuant(4)
CODECS: dict[str, RowCodec | Codec] = {
    "float8": Float8(),
    "int8": Int8(),
    "uniform 4": Uniform(4),
    "turbo 4": FOUR,
    "turbo 4, centred": Codec(FOUR, FOUR, centre=True),
    "turbo 4, centred, 4 first exact": Codec(FOUR, FOUR, centre=True, exact=(4, 0)),
    "turbo 4, centred, 4 first and 32 last exact": Codec(FOUR, FOUR, centre=True, exact=(4, 32)),
    "keys turbo 4, values as they are, centred": Codec(FOUR, None, centre=True),
    "values turbo 4, keys as they are, centred": Codec(None, FOUR, centre=True),
    "turbo 3, centred, 4 first exact": Codec(TurboQuant(3), TurboQuant(3), centre=True, exact=(4, 0)),
    "turbo 2, centred, 4 first exact": Codec(TurboQuant(2), TurboQuant(2), centre=True, exact=(4, 0)),
}


def main(
    text: pathlib.Path,
    model: str = "smollm2-135m-instruct",
    passages: int = 8,
    length: int = 1024,
    prompt: int = 256,
    only: tuple[str, ...] = tuple(CODECS),
    output: pathlib.Path | None = None,
) -> None:
    """What codecs of keys and values cost in likelihood, beside their bits.

    Args:
      text: a file.
      model: a checkpoint.
      passages: of the text, from its beginning, which run together.
      length: tokens of each.
      prompt: of these, tokens that are read before anything is coded.
      only: the codecs to try.
      output: a JSON file of what was found.
    """
    check_whole(1, passages=passages, prompt=prompt)
    check_whole(prompt + 2, length=length)
    if unknown := [name for name in only if name not in CODECS]:
        raise ValueError(f"only has {unknown[0]!r}; there are {', '.join(CODECS)}")
    check_output(output)
    loaded, params = models.load(model)
    ids = models.load_tokenizer(model).encode(text.read_text())[: passages * length]
    if len(ids) < passages * length:
        raise ValueError(f"{text} has {len(ids)} tokens, but {passages} passages of {length} need {passages * length}")
    tokens = np.array(ids, np.int32).reshape(passages, length)
    print("| codec | bits | perplexity | more, % |\n|---|---|---|---|", flush=True)
    rows = []
    for name, codec in {"none": None, **{name: CODECS[name] for name in only}}.items():
        policy = kvjax.Policy() if codec is None else kvjax.coded(kvjax.Policy(), codec)
        how = {"policy": policy, "max_new_tokens": length - prompt}
        _, state = kvjax.prefill(loaded, params, tokens[:, :prompt], **how)
        stored = [(kv.k, kv.v) for kv in state.layers]
        numbers = sum(math.prod(x.shape) for both in stored for x in both)
        logits, _ = kvjax.feed(loaded, params, tokens[:, prompt:], state)
        likely = jax.nn.log_softmax(jnp.asarray(logits[:, :-1], jnp.float32))
        nll = -jnp.take_along_axis(likely, tokens[:, prompt + 1 :, None], -1)[..., 0].mean(-1)
        bits = 8 * sum(x.nbytes for x in jax.tree.leaves(stored)) / numbers
        rows.append({"codec": name, "bits": bits, "nll": np.asarray(nll, np.float64).tolist()})
        more = interval(np.subtract(rows[-1]["nll"], rows[0]["nll"]))
        ends = [f"{100 * math.expm1(float(x)):.2f}" for x in more]
        perplexity = math.exp(float(np.mean(np.asarray(nll))))
        print(f"| {name} | {bits:.2f} | {perplexity:.3f} | {ends[0]} [{ends[1]}, {ends[2]}] |", flush=True)
    sizes = {"model": model, "passages": passages, "length": length, "prompt": prompt}
    write_found(output, **sizes, text=text.name, rows=rows)


if __name__ == "__main__":
    script(main)
