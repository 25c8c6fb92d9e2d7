"""What the recorders of other libraries' kept tokens share: layers that read a case, and how cases are written."""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from . import peer_tensors
from .peer_tensors import KV_HEADS, QUERY_HEADS, THETA

NOISE, TRIES = 1e-5, 40


class Layers:
    """The attention layers of a random Llama that a case is read by.

    Args:
      case: the case.
      noise: relative changes of its tensors, drawn with this as their seed; none if None.

    Attributes:
      prompt_length: tokens of the prompt, after which others may come.
      model: the Llama. attention: its attention layers. cache: what they have read.
      hidden: the hidden states "1 T D" of every layer.
      everything: the rotated keys and the values "K T H" of all tokens, in every layer.
    """

    def __init__(self, case: dict[str, Any], noise: int | None = None):
        H, L, D = case["head_dim"], case["layers"], peer_tensors.embed_dim(case["head_dim"])
        self.prompt_length = case["tokens"]
        sizes = {"hidden_size": D, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": L, "head_dim": H}
        heads = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": KV_HEADS, "rope_theta": THETA}
        config = LlamaConfig.from_dict({**sizes, **heads, "max_position_embeddings": 1024})
        self.model = LlamaForCausalLM(config).eval()
        self.attention = [layer.self_attn for layer in self.model.model.layers]
        self.cache: Any = DynamicCache()
        self.hidden: list[torch.Tensor] = []
        rng = None if noise is None else np.random.default_rng(noise)
        for i, attention in enumerate(self.attention):
            attention.rotary_emb = self.model.model.rotary_emb
            tensors = peer_tensors.layer_tensors(case, i)
            if rng is not None:
                shake = lambda x: (x * (1 + NOISE * rng.standard_normal(x.shape))).astype(np.float32)
                tensors = {name: shake(x) for name, x in tensors.items()}
            self.hidden.append(torch.from_numpy(peer_tensors.hidden_states(tensors))[None])
            rows = torch.eye(D).split([QUERY_HEADS * H, KV_HEADS * H, KV_HEADS * H])
            with torch.no_grad():
                for projection, some in zip("qkv", rows, strict=True):
                    getattr(attention, f"{projection}_proj").weight.copy_(some)
                attention.o_proj.weight.copy_(torch.from_numpy(tensors["out_proj"].reshape(-1, D).T))
        self.everything = self._everything()

    def _everything(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        cache: Any = DynamicCache()
        for i in range(len(self.attention)):
            self.attend(i, cache, 0, self.hidden[i].shape[1])
        return [(layer.keys[0], layer.values[0]) for layer in cache.layers]

    def rotations(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines "1 T H" at positions from `first` to `last`."""
        return self.model.model.rotary_emb(self.hidden[0], torch.arange(first, last)[None])

    def projected(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries "1 N T H" and keys "1 K T H" of all tokens, rotated, and their values."""
        hidden, attention = self.hidden[layer], self.attention[layer]
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        heads = lambda x: x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        q, k, v = (heads(projection(hidden)) for projection in projections)
        return *apply_rotary_pos_emb(q, k, *self.rotations(0, hidden.shape[1])), v

    def attend(self, layer: int, cache: Any, first: int, last: int, at: int | None = None) -> Any:
        """Reads tokens `first` to `last`, the first of them at a position."""
        hidden = self.hidden[layer][:, first:last]
        T, at = last - first, first if at is None else at
        held = cache.get_seq_length(layer) if len(cache.layers) > layer else 0
        positions = torch.arange(at, at + T)
        mask = torch.full((T, held + T), float("-inf")).triu(held + 1)[None, None] if T > 1 else None
        return self.attention[layer](
            hidden_states=hidden,
            position_embeddings=self.rotations(at, at + T),
            attention_mask=mask,
            past_key_values=cache,
            cache_position=positions,
            position_ids=positions[None],
        )

    def prompt(self) -> None:
        """Every layer reads the prompt."""
        for i in range(len(self.attention)):
            self.attend(i, self.cache, 0, self.prompt_length)

    def steps(self) -> None:
        """Every layer reads one token after another."""
        for at in range(self.prompt_length, self.hidden[0].shape[1]):
            for i in range(len(self.attention)):
                self.attend(i, self.cache, at, at + 1)


def slots_of(states: torch.Tensor, tokens: torch.Tensor, name: str) -> dict[int, int]:
    """The slot of every token that is left of one head.

    Args:
      states: keys or values that are left, "S H".
      tokens: those of all tokens, "T H".
      name: of the states, for errors.

    Raises:
      ValueError: states that are no token's, or a token that is there twice.
    """
    far = (states[:, None] - tokens[None]).abs().amax(-1)
    token = far.argmin(-1)
    if not (far.amin(-1) < 1e-6).all() or len(set(token.tolist())) != len(token):
        raise ValueError(f"{name} are not those of tokens")
    return {t: slot for slot, t in enumerate(token.tolist())}


def signs(among: Iterable[int], total: int) -> str:
    """A string of `total` signs, "1" for those among some and "0" for others."""
    held = set(among)
    return "".join("01"[i in held] for i in range(total))


RECORDED = ("seed", "kept", "channels", "values", "keys")


def record(
    name: str, cases: Iterable[dict[str, Any]], run: Callable[[dict[str, Any], int | None], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Cases with what is kept, of the first seeds where it does not hang on the last digits.

    Args:
      name: of what keeps it.
      cases: cases; their seeds, and what was recorded of them, are replaced.
      run: what is kept in a case, with noise of this seed or none.

    Raises:
      ValueError: what is kept hangs on the last digits, whatever the seed.
    """
    recorded = []
    for case in cases:
        given = {key: x for key, x in case.items() if key not in RECORDED}
        for seed in range(TRIES):
            seeded = given | {"seed": seed}
            found = run(seeded, None)
            if all(_sets(run(seeded, noise)) == _sets(found) for noise in (1, 2)):
                recorded.append(seeded | found)
                break
        else:
            raise ValueError(f"{name}: {TRIES} seeds hang on the last digits; record another case")
    print(f"{name}: seeds {[case['seed'] for case in recorded]}", flush=True)
    return recorded


def _sets(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in found if name in ("kept", "channels")}


def write(
    path: pathlib.Path, about: dict[str, Any], title: str, groups: Mapping[str, Sequence[dict[str, Any]]]
) -> None:
    """Writes the file, one case a line, groups under a title."""
    text = lambda cases: ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    lines = ",\n".join(f"{json.dumps(name)}: [\n{text(cases)}\n]" for name, cases in groups.items())
    path.write_text(f'{{"about": {json.dumps(about)},\n"{title}": {{\n{lines}\n}}}}\n')
