"""Methods that hide what they keep: tokens from a row, pages of tokens, channels of keys."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets import STEP
from kvjax.compose.evict import Evict
from kvjax.contract import (
    Amount,
    AttentionInputs,
    Context,
    Count,
    LayerInfo,
    LayerView,
    Observation,
    PerHead,
    Phase,
    Policy,
    Prompts,
    Reads,
    Size,
    Sizes,
    Stats,
    count,
    resolve,
    resolved,
    value,
)
from kvjax.observe import QuerySquares
from kvjax.pallas_kernels.kinds import ProportionBelowOne
from kvjax.scores.attention import Recency


@value
class EveryOther:
    """Shows a row its own token, and those at distances that `step` divides."""

    step: Size

    def __call__(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> Bool[Array, "B K S"]:
        """The slots that the newest row reads."""
        return kv.live & (((ctx.length - 1)[:, None, None] - kv.pos) % self.step == 0)


def dilated_window(budget: Count, *, dilation: Amount = 1) -> Evict:
    """Reads the newest token and those at distances D + 1, 2 (D + 1), ... (Keyformer, arXiv 2403.09054, figure 2c).

    All tokens of a plain window stay, as every row reads others than the one before it.

    Args:
      budget: live tokens a kv head and layer.
      dilation: D; 0 is a plain window.
    """
    return Evict(Recency(), budget, when=STEP, mask=EveryOther(dilation + 1))


class DropChannels(Policy):
    """Drops a share of every head's key channels once the prompt has been read; every token stays.

    Attributes:
      share: of the channels that goes.
      rows: the prompt's last rows whose queries count.
    """

    share: ProportionBelowOne
    rows: Size = 32

    def sizes(self, info: LayerInfo, lengths: Prompts) -> Sizes:
        if info.latent:
            raise ValueError(
                f"{type(self).__name__} drops key channels, but values of layer {info.layer} are channels of its keys; "
                "choose a policy that keeps all"
            )
        return super().sizes(info, lengths)

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (QuerySquares(self.rows),) if phase == "prefill" else ()

    def channels(self, kv: LayerView, stats: Stats) -> Array:
        """The channels "B K C" that stay, in order."""
        k, H = jnp.where(kv.live[..., None], jnp.square(kv.k.astype(jnp.float32)), 0.0), kv.k.shape[-1]
        mean = k.sum(2) / jnp.maximum(kv.num_live, 1).astype(jnp.float32)[..., None]
        weight = stats[QuerySquares(self.rows)] * mean
        return jnp.sort(lax.top_k(weight, H - int(H * self.share))[1], axis=-1)

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        return kv if ctx.phase == "decode" else kv.replace(channels=self.channels(kv, stats))


def think(channels: ProportionBelowOne = 0.5, *, rows: Size = 32) -> DropChannels:
    r"""Drops the key channels that matter least to the last queries (ThinK, Xu et al., arXiv 2407.21018).

    A channel's score is $\mathrm{mean}_i(q_{ic}^2) \, \mathrm{mean}_j(k_{jc}^2)$ (section 3.2). Chain it behind a
    policy that evicts tokens.

    Args:
      channels: share of the key channels that goes.
      rows: the prompt's last rows whose queries count.
    """
    return DropChannels(channels, rows)


class ReadPages(Policy):
    """Keeps everything; a decode row reads of every head pages whose bounds for its queries are largest.

    The page of the row's own token is always among them. Another number of pages is another program, as few pages are
    copied and read alone.

    Attributes:
      budget: tokens that a row reads of a kv head, in whole pages; one page at least.
      size: tokens of a page.
    """

    budget: Count = count()
    size: Size = 16

    def __post_init__(self) -> None:
        if isinstance(self.budget, int) and self.budget < self.size:
            raise ValueError(
                f"a budget of {self.budget} tokens holds no page of {self.size}; raise it, or shrink pages"
            )

    def sizes(self, info: LayerInfo, lengths: Prompts) -> Sizes:
        """Everything is kept. Data says by its shape, too, how many pages of a head are read at most."""
        most = np.full_like(lengths, info.prompt_len + info.max_new_tokens)
        budget = int(resolve(self.budget, np.append(lengths, info.prompt_len)).max())
        pages = np.zeros((len(lengths), min(max(budget // self.size, 1), self._num_pages(info))), bool)
        return Sizes(most, info.num_kv_heads * most, resolved(self, info, lengths, pages=pages))

    def _num_pages(self, info: LayerInfo) -> int:
        return -(-(info.prompt_len + info.max_new_tokens) // self.size)

    def memory(self, info: LayerInfo) -> tuple[PerHead, PerHead]:
        shape = self._num_pages(info), info.head_dim
        return PerHead(shape, fill=-jnp.inf), PerHead(shape, fill=jnp.inf)

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        """The bounds of every page's keys. A step adds its own token's, whose page the next row reads anyway.

        Raises:
          ValueError: keys that move after they were read.
        """
        if kv.how.positions != "original":
            raise ValueError(
                f"pages have the bounds of keys where these were read, but tokens stand at positions="
                f'"{kv.how.positions}", where keys move; read pages of "original" ones'
            )
        (high, low), (B, K, S) = kv.memory, kv.pos.shape
        slot = jnp.broadcast_to(jnp.arange(S), kv.pos.shape)
        if ctx.phase == "decode":
            slot = jnp.where(kv.pos == ctx.length[:, None, None] - 1, slot, -1).max(-1, keepdims=True)
        k, pos = (jnp.take_along_axis(x, i, 2) for x, i in ((kv.k, slot[..., None]), (kv.pos, slot)))
        page = jnp.where((slot >= 0) & (pos >= 0), pos // self.size, high.shape[2])
        at, k = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], page), k.astype(jnp.float32)
        return kv.replace(memory=(high.at[at].max(k, mode="drop"), low.at[at].min(k, mode="drop")))

    def reads(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> Reads | None:
        if inputs.q.shape[2] > 1:
            return None
        bound, newest = self._bounds(kv, inputs), ctx.length[:, None, None] - 1
        page, exists = jnp.arange(bound.shape[2])[None, None], jnp.isfinite(kv.memory[0][..., 0])
        if inputs.logits.window is not None:  # of other pages the row sees nothing
            exists &= newest - jnp.minimum((page + 1) * self.size - 1, newest) < inputs.logits.window
        bound = jnp.where(page == newest // self.size, jnp.inf, jnp.where(exists, bound, -jnp.inf))
        most, page = lax.top_k(bound, ctx.hparams.pages.shape[1])  # of equal bounds, the older pages
        count = jnp.maximum(ctx.hparams.budget // self.size, 1)[:, None, None]
        is_read = (jnp.arange(page.shape[2])[None, None] < count) & (most > -jnp.inf)
        read = jnp.put_along_axis(jnp.zeros(bound.shape, bool), page, is_read, -1, inplace=False)
        visible = kv.live & jnp.take_along_axis(read, self._page(kv), -1)
        if 3 * page.shape[2] * self.size >= kv.pos.shape[2]:  # a copy of so much takes longer than to read all
            return Reads(visible)
        at = jnp.where(is_read[..., None], self._slots(page, kv), -1)
        return Reads(visible, at=at.reshape(*page.shape[:2], -1))

    def _slots(self, page: Int[Array, "B K R"], kv: LayerView) -> Int[Array, "B K R size"]:
        """The slots of the tokens of some pages, -1 where a page lacks a token."""
        (B, K, S), T = kv.pos.shape, kv.memory[0].shape[2] * self.size
        slot = jnp.broadcast_to(jnp.arange(S), kv.pos.shape)
        in_text = jnp.pad(jnp.where(kv.live, slot, -1), ((0, 0), (0, 0), (0, T)), constant_values=-1)[..., :T]
        at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(kv.live, kv.pos, T)
        of_token = lambda: jnp.full((B, K, T), -1).at[at].set(slot, mode="drop")
        slots = lax.cond(((kv.pos == slot) | ~kv.live).all(), lambda: in_text, of_token)
        token = page[..., None] * self.size + jnp.arange(self.size)[None, None, None]
        return jnp.take_along_axis(slots, token.reshape(B, K, -1), -1).reshape(token.shape)

    def _page(self, kv: LayerView) -> Int[Array, "B K S"]:
        return jnp.maximum(kv.pos, 0) // self.size

    def _bounds(self, kv: LayerView, inputs: AttentionInputs) -> Float[Array, "B K P"]:
        """The most that a query of each kv head can find in every page."""
        (high, low), q, (B, K, S) = kv.memory, inputs.q, kv.pos.shape
        rows = q.reshape(B, K, -1, 1, q.shape[-1]).astype(jnp.float32)
        if kv.channels is not None:  # of which those alone are read that are left
            high, low, rows = (
                jnp.take_along_axis(x, kv.channels.reshape(B, K, *(1,) * (x.ndim - 3), -1), -1)
                for x in (high, low, rows)
            )
        bounds = jnp.where(rows > 0, rows * high[:, :, None], rows * low[:, :, None]).sum(-1)
        if inputs.bias is not None:  # the largest of a page's own, in logits
            bias = jnp.broadcast_to(inputs.bias, (B, q.shape[1], S)).reshape(B, K, -1, S).swapaxes(2, 3)
            at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], self._page(kv)
            most = jnp.full((B, K, high.shape[2], bias.shape[-1]), -jnp.inf)
            most = most.at[at].max(jnp.where(kv.live[..., None], bias, -jnp.inf)).swapaxes(2, 3)
            bounds = jnp.where(jnp.isfinite(most), inputs.logits.of(bounds, q.shape[-1]) + most, -jnp.inf)
        return bounds.max(2)


class FirstLayers(Policy):
    """One policy for the first layers, another for the rest.

    Attributes:
      first: the policy of the first layers.
      rest: the policy of the rest.
      num: how many layers are the first.
    """

    first: Policy
    rest: Policy
    num: Amount

    def __post_init__(self) -> None:
        if self.first.joint or self.rest.joint:
            raise ValueError("a policy that decides for all layers at once cannot be a member of some of them")

    def at(self, layer: int, num_layers: int) -> Policy:
        return (self.first if layer < self.num else self.rest).at(layer, num_layers)


def quest(budget: Count, *, size: Size = 16, dense: Amount = 2) -> FirstLayers:
    r"""Reads the tokens of some pages at every step, and evicts nothing (Quest, Tang et al., arXiv 2406.10774).

    A page is read if its bound $\sum_d \max(q_d M_d, q_d m_d)$ is among the largest, $M$ and $m$ being the largest and
    smallest keys of the page in every channel (section 3.3). A row's own page is always read.

    Args:
      budget: tokens that a row reads of a kv head, in whole pages.
      size: tokens of a page.
      dense: the first layers, whose rows read everything.
    """
    return FirstLayers(Policy(), ReadPages(budget, size), dense)
