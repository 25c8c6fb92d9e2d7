"""The figures of the five papers on any model and text. Each is a function that returns arrays, and one that plots."""

from kvjax.experiments.papers.adakv import head_concentration, loss_bound, plot_head_concentration, plot_loss_bound
from kvjax.experiments.papers.ahakv import attention_entropy, plot_attention_entropy
from kvjax.experiments.papers.base import PaperFigure as PaperFigure
from kvjax.experiments.papers.positions import (
    eviction_scores,
    plot_eviction_scores,
    plot_retained_positions,
    retained_positions,
)
from kvjax.experiments.papers.roco import (
    attention_by_age,
    importance_jaccard,
    plot_attention_by_age,
    plot_importance_jaccard,
    plot_scope_size,
    scope_size,
)
from kvjax.experiments.papers.sparsity import (
    attention_heatmaps,
    attention_mass,
    attention_sparsity,
    plot_attention_heatmaps,
    plot_attention_mass,
    plot_attention_sparsity,
)

FIGURES: dict[str, PaperFigure] = {
    "importance_jaccard": PaperFigure(importance_jaccard, plot_importance_jaccard, prompts=6, length=320),
    "attention_by_age": PaperFigure(attention_by_age, plot_attention_by_age, prompts=8, length=1024),
    "scope_size": PaperFigure(scope_size, plot_scope_size, prompts=64, length=576),
    "retained_positions": PaperFigure(retained_positions, plot_retained_positions, prompts=16, length=1024),
    "eviction_scores": PaperFigure(eviction_scores, plot_eviction_scores, prompts=16, length=1024),
    "attention_sparsity": PaperFigure(attention_sparsity, plot_attention_sparsity, prompts=4, length=1024),
    "attention_entropy": PaperFigure(attention_entropy, plot_attention_entropy, prompts=8, length=1024),
    "attention_mass": PaperFigure(attention_mass, plot_attention_mass, prompts=8, length=1024),
    "head_concentration": PaperFigure(head_concentration, plot_head_concentration, prompts=16, length=1024),
    "loss_bound": PaperFigure(loss_bound, plot_loss_bound, prompts=32, length=1024),
    "attention_heatmaps": PaperFigure(attention_heatmaps, plot_attention_heatmaps, prompts=1, length=160),
}
