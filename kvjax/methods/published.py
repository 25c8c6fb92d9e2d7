"""What was published of the kv heads of real models."""

import json
import pathlib
import re

import numpy as np

from kvjax.contract import Config, kv_layers
from kvjax.pallas_kernels import kinds


def published(where: str | pathlib.Path, config: Config) -> np.ndarray:
    """DuoAttention's gates "L K" of a model, or Attention Matching's shares, by its name.

    Gates are cut to [0, 1], as in DuoAttention's code. Shares become multiples of the average, which layers with a
    window have: `headkv` divides by them with `beta=1.0`, `kvjax.learning.relax.with_table` in the place of Ada-KV.

    Args:
      where: FOLDER/NAME, of a file NAME.tsv of gates, a row a layer, or NAME.json of shares by "L0H0".
      config: of the model.

    Raises:
      ValueError: no such name, with those there are, or what is not of the model's layers and kv heads.
    """
    file = next((x for end in ("", ".tsv", ".json") if (x := pathlib.Path(f"{where}{end}")).is_file()), None)
    if file is None:
        names = ", ".join(sorted(x.stem for x in pathlib.Path(where).parent.glob("*.[tj]s*")))
        raise ValueError(f"nothing is published as {where}; its folder has {names or 'no files .tsv or .json'}")
    layers, K, average = range(len(kv_layers(config))), config.num_kv_heads, 1.0
    try:
        if file.suffix == ".tsv":
            wanted, found = layers, dict(np.ndenumerate(np.clip(np.loadtxt(file, ndmin=2), 0, 1)))
        else:
            at = lambda name: tuple(map(int, re.findall(r"^L(\d+)H(\d+)$", name)[0]))
            found = {at(name): float(x) for name, x in json.loads(file.read_bytes()).items()}
            wanted = [i for i in layers if getattr(config, "window", lambda i: None)(i) is None]
            average = np.mean([*found.values()])
    except (ValueError, TypeError, AttributeError, IndexError) as e:
        raise ValueError(f"{file} has no gates or shares of heads: {e}") from e
    if {*found} != {(i, head) for i in wanted for head in range(K)}:
        L, heads = (len({at[axis] for at in found}) for axis in (0, 1))
        here = f"{file} has {L} layers of {heads} kv heads, but the model {len(wanted)} of {K} to give them to"
        raise ValueError(f"{here}; take what was published for this model")
    return np.array([[found.get((i, head), average) / average for head in range(K)] for i in layers])


kinds.doors(__name__)
