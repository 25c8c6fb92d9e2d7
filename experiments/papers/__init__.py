"""The five papers' figures on any model and text: of each a function that returns arrays, and one that plots them."""

from kvjax.experiments.papers import adakv, ahakv, positions, roco, sparsity
from kvjax.experiments.papers.base import PaperFigure

FIGURES: dict[str, PaperFigure] = {
    "importance_jaccard": PaperFigure(roco.importance_jaccard, roco.plot_importance_jaccard, 6, 320),
    "attention_by_age": PaperFigure(roco.attention_by_age, roco.plot_attention_by_age, 8, 1024),
    "scope_size": PaperFigure(roco.scope_size, roco.plot_scope_size, 64, 576),
    "retained_positions": PaperFigure(positions.retained_positions, positions.plot_retained_positions, 16, 1024),
    "value_prior": PaperFigure(positions.value_prior, positions.plot_value_prior, 16, 1024),
    "scores_by_step": PaperFigure(positions.scores_by_step, positions.plot_scores_by_step, 8, 1024),
    "score_distributions": PaperFigure(positions.score_distributions, positions.plot_score_distributions, 8, 544),
    "token_survival": PaperFigure(positions.token_survival, positions.plot_token_survival, 8, 1024),
    "attention_by_length": PaperFigure(sparsity.attention_by_length, sparsity.plot_attention_by_length, 16, 1024),
    "attention_sparsity": PaperFigure(sparsity.attention_sparsity, sparsity.plot_attention_sparsity, 4, 1024),
    "attention_entropy": PaperFigure(ahakv.attention_entropy, ahakv.plot_attention_entropy, 8, 1024),
    "score_decline": PaperFigure(ahakv.score_decline, ahakv.plot_score_decline, 16, 1024),
    "gumbel_entropy": PaperFigure(sparsity.gumbel_entropy, sparsity.plot_gumbel_entropy, 8, 1024),
    "attention_mass": PaperFigure(sparsity.attention_mass, sparsity.plot_attention_mass, 8, 1024),
    "head_concentration": PaperFigure(adakv.head_concentration, adakv.plot_head_concentration, 16, 1024),
    "loss_bound": PaperFigure(adakv.loss_bound, adakv.plot_loss_bound, 32, 1024),
    "attention_heatmaps": PaperFigure(sparsity.attention_heatmaps, sparsity.plot_attention_heatmaps, 1, 160),
}
"""By name: what computes it, what draws it, and the prompts and their length that it is made for."""
