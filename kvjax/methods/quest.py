"""Quest (arXiv 2406.10774)."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.cache import mesh
from kvjax.cache.context import Context, Site
from kvjax.cache.state import Chosen, LayerKV
from kvjax.pallas_kernels.values import a, one_of, settle, tokens
from kvjax.policy import Granularity, LayerSpec, Rule, keeps_all
from kvjax.scoring.pages import Pages, PageTable
from kvjax.scoring.select import Selection
from kvjax.scoring.stats import LayerStats, Moment
from kvjax.sizes.budget import Count, Tokens, as_budget, lookup


@dataclasses.dataclass(frozen=True)
class ReadPages(Rule):
    """Keeps everything; a decode row reads of every head the pages whose bounds for its queries are largest.

    The page of the row's own token is always among them. Of the others, the older of two equal ones goes first.

    Attributes:
      budget: tokens that a row reads of every kv head, in whole pages: a number of tokens (int), which holds at least
        one page, or a share of the prompt (float), of which a shorter prompt reads one page.
      pages: what is known of keys together.
      group: how the bounds of the query heads of a kv head become one.
      dense_layers: the first layers, whose rows read everything.
      granularity: "kv_head" reads for every kv head; "query_head" stores keys and values for every query head, each
        with pages of its own, in a cache that is G times larger.
    """

    budget: int | float | Count
    pages: Pages = Pages()
    group: Literal["max", "mean"] = "max"
    dense_layers: int = 2
    granularity: Granularity = "kv_head"

    def __post_init__(self):
        object.__setattr__(self, "budget", as_budget(self.budget))
        settle(self, pages=a(Pages), dense_layers=tokens())
        one_of("group", self.group, "max", "mean")
        one_of("granularity", self.granularity, "kv_head", "query_head")
        if isinstance(self.budget, Tokens) and self.budget.n < self.pages.size:
            raise ValueError(
                f"a budget of {self.budget.n} tokens holds no page of {self.pages.size}; raise the budget or read "
                "smaller pages"
            )

    def rules(self, site: Site) -> tuple[Rule, ...]:
        """See `Policy`; nothing in the first layers."""
        return () if site.layer < self.dense_layers else (self,)

    def spec(self, site: Site) -> LayerSpec:
        """See `Rule`."""
        return keeps_all(self._own(site), heads=self.granularity, hides="visible", timed=False)

    def _own(self, site: Site) -> Site:
        heads = site.num_kv_heads if self.granularity == "kv_head" else site.num_query_heads
        return dataclasses.replace(site, num_kv_heads=heads)

    @property
    def apart(self) -> bool:
        """See `Rule`."""
        return True

    def _table(self, site: Site) -> np.ndarray:
        """Pages that a row reads, for every prompt length."""
        lengths = np.arange(site.prompt_len + 1)
        return np.maximum(as_budget(self.budget).table(lengths, lengths) // self.pages.size, 1)

    def _most(self, site: Site) -> int | None:
        """Pages that a row of any sequence reads at most; None where that may be all that there are."""
        most = int(self._table(site).max())
        return most if most < self.pages.number(site) else None

    def init(self, site: Site, batch: int) -> PageTable | tuple[()]:
        """See `Rule`."""
        return () if self._most(site) is None else self.pages.init(site, batch)

    def appended(self, kv: LayerKV, ctx: Context) -> PageTable | tuple[()]:
        """See `Rule`."""
        if self._most(ctx.site) is None:
            return kv.memory
        own = kv.memory, dataclasses.replace(kv, memory=())
        return mesh.by_head(lambda own, newest: self.pages.joined(own[0], own[1], newest), own, ctx.length - 1)

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Rule`: nothing is evicted."""
        del stats, ctx
        return kv.memory, None

    def visible(self, moment: Moment) -> Chosen | None:
        """See `Rule`."""
        ctx, most = moment.ctx, self._most(moment.ctx.site)
        if ctx.phase == "prefill" or most is None:
            return None

        def chosen(own: tuple[PageTable, Array, Array | None], newest: Array, count: Array) -> Array:
            best, pages = lax.top_k(self._ranked(own[0], own[1], own[2], newest, moment), most)
            found = jnp.take_along_axis(own[0].slots.value, pages[..., None], axis=2, mode="promise_in_bounds")
            reads = (jnp.arange(most, dtype=jnp.int32)[None] < count[:, None])[:, None] & (best > -jnp.inf)
            return jnp.where(reads[..., None], found, -1).reshape(*found.shape[:2], -1)

        slopes = None if moment.slopes is None else jnp.asarray(moment.slopes, jnp.float32)[None]
        own, count = (moment.kv.memory, moment.q[:, :, 0], slopes), lookup(self._table(ctx.site), ctx.prompt_length)
        return Chosen(mesh.by_head(chosen, own, ctx.length - 1, count))

    def _ranked(
        self,
        table: PageTable,
        q: Float[Array, "B N H"],
        slopes: Float[Array, "1 N"] | None,
        newest: Int[Array, "B"],
        moment: Moment,
    ) -> Float[Array, "B K P"]:
        """What every page is ranked by: infinite for the newest token's, -inf for one of which its row reads nothing.

        A page's bound is that of its logits, whose place is the page's nearest to the row.
        """
        (B, K, P), H = table.counts.value.shape, q.shape[-1]
        bounds = self.pages.bounds(table, q.reshape(B, K, -1, H))
        bounds = bounds * (H**-0.5 if moment.scale is None else moment.scale)
        bounds = bounds if moment.softcap is None else moment.softcap * jnp.tanh(bounds / moment.softcap)
        page, newest = jnp.arange(P, dtype=jnp.int32)[None], newest[:, None]
        behind = newest - jnp.minimum((page + 1) * self.pages.size - 1, newest)  # "B P"
        if slopes is not None:
            bounds = bounds - slopes.reshape(1, K, -1, 1) * behind[:, None, None].astype(bounds.dtype)
        ranked = bounds.max(2) if self.group == "max" else bounds.mean(2)
        read = table.counts.value > 0
        if moment.window is not None:
            read &= (behind < moment.window)[:, None]
        return jnp.where((page == newest // self.pages.size)[:, None], jnp.inf, jnp.where(read, ranked, -jnp.inf))


def quest(
    budget: int | float | Count,
    *,
    page_size: int = 16,
    dense_layers: int = 2,
    group: Literal["max", "mean"] = "max",
    granularity: Granularity = "kv_head",
) -> ReadPages:
    r"""Selection instead of eviction: everything stays, and every decode row reads the tokens of some pages.

    A page is `page_size` consecutive positions. With $M_d$ and $m_d$ the largest and the smallest number of its rotated
    keys in channel $d$, the product of a query $q$ with any of them is at most

    $$ \sum_d \max(q_d M_d, q_d m_d) $$

    (section 3.3, Algorithm 1 and 2). Every kv head reads the pages of the largest bounds, as many as the budget holds,
    and its row's own page always. The first `dense_layers` layers read everything, and so do the prompt's rows. The
    bounds of $M$ and $m$ are kept up while decoding, one token a step; where another policy of a chain evicts, they are
    made anew from all keys of that step.

    What the released code does (mit-han-lab/Quest), and what is done here:

    * Its evaluation lets every query head choose pages of its own, also where heads share keys: `granularity=
      "query_head"`, in a cache that is as many times larger. Its kernels know no shared keys. Here the query heads of a
      kv head read the same pages, by the largest of their bounds or, with `group="mean"`, by the mean; bounds are those
      of logits, with scale, softcap and ALiBi's slopes.
    * Its kernels always read the last page, its evaluation lets it compete like any other. Here it is always read, and
      counts against the budget.
    * Its evaluation reads at least 3 pages whatever the budget. Here a number of tokens that holds no page is refused,
      and a share of the prompt that holds none reads one.
    * In layers with a sliding window, pages of which the row can read nothing are no candidates.

    A step reads P pairs of vectors in place of all keys, then gathers the keys and values of the budget. On one CPU
    thread, with all layers reading 256 tokens, it was 1.3 times as fast as the full cache after 4,096 tokens and
    1.9 times after 16,384; reading a quarter of 4,096 tokens it was slower, 0.9 times as fast, since a gathered key
    costs more than one that is read in its place (`experiments/bench_decode.py --random`).

    Nothing of this frees memory: keys and values stay, and beside them pages take 2 / `page_size` of the keys'
    numbers, in 32 bits, and the slot of every position.

    Args:
      budget: tokens that a row reads of a kv head, in whole pages.
      page_size: positions of a page.
      dense_layers: the first layers, whose rows read everything.
      group: how the bounds of the query heads of a kv head become one.
      granularity: see `ReadPages`.
    """
    return ReadPages(budget, Pages(page_size), group, dense_layers, granularity)
