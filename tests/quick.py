"""What the default run asks of files whose tests compile for long: some of each thing that they are about.

CI asks the rest (`pytest -m "slow and not exhaustive"`). A file that is not named is quick as a whole, but for what is
marked in it, and for rows of `table.py`, which has its own `SMOKE`. Values are regular expressions that tests' names
without "test_" start with.
"""

import re

# Of these files no more than this stays.
ONLY = {
    "test_across.py": "one_top_k|a_layer_of_no_weight|the_least",
    "test_beam.py": r"bad_input|equals_transformers\[1|one_beam_breaks",
    "test_families.py": (
        r"a_simplex|filling|floors|hard|only|what_is_refused|gradients\w+\[(layers|heads)|cold\w+\[window"
    ),
    "test_learning.py": (
        r"budgets_(have_exact_gradients_in|out|that)|gates|ranks|the_|what|falling\w+\[(tova|ada)|a_small"
    ),
    "test_parity.py": r"\w+\[(llama|gpt2|gemma3|h2o)\]|\w+\[(tied|bi|0|1)|rotary|slopes|layers_of",
    "test_peer_cases.py": r"(?!cam_is|the_same)|the_same_tokens\[(SnapKVPress|PyramidKVPress\(r, w|Knorm|HeadKV|cake)",
    "test_plan.py": r"(?!rounding|rounded|a_budget|rows_of|a_prompt_that)|rounding\w+\[h2o",
    "test_readme.py": r"every|a_policy|a_block_runs\[(Prompts|A learned gate|Meshes|The kernel|Memory|A learned score)",
    "test_steps.py": (
        r"tokens_app|recency|blocks_are|memory|an_empty|learned"
        r"|a_bucket|seq|req|sizes|the_budget\w+\[after|keys_that\w+\[protected"
    ),
    "test_traces.py": r"(?!voters|gates_cost|gates_have|votes)|gates_have\w+\[output",
}

# Of these files all stays but this.
WITHOUT = {
    "test_analysis_curves.py": "curves_are_means|masks_are|nothing_is|what_slots",
    "test_attend.py": r"a_head_without_numbers\w+\[(?!None)|a_layer_that_loses",
    "test_checkpoint.py": r"a_compressed_prompt\w+\[(?!pool)",
    "test_compose.py": (
        r"heads_get\w+\[(?!table-True)|room_is\w+\[(?!2-True)|every_head|what_is_spared\w+\[table"
        r"|layers_that_share\w+one_budget"
    ),
    "test_contract.py": "generating_enters",
    "test_depth.py": "a_prompt_that_is_read_inside",
    "test_embedded.py": "it_retrieves",
    "test_engine.py": "answers_that_are_searched|every_row",
    "test_examples.py": r"layers_that_compete|e38|e05|e01|a_dilated\w+\[(3|6)",
    "test_examples_scores.py": r"e30|e22|lagkv\w+\[(2|4)|e39",
    "test_fastgen.py": "a_row_that",
    "test_generation.py": (
        r"texts_beyond\w+\[(?!read|start)|requests_of|a_short_row|a_text_that|what_is_past\w+\[policy1|sampling_is"
    ),
    "test_gguf.py": "processes|a_model_by_name",
    "test_interrupted.py": "a_signal_stops",
    "test_kept.py": r"keeps_what_was_recorded_on_a_model\[(?!h2o|kvzip)",
    "test_kernels.py": (
        r"memory_grows|gradients_(through|under|of_a_bias)|own_softmax\[.*(cached': 6|reference)|the_only_key"
        r"|no_probability|tiles|a_multiplier|any_block_size\[block1|against_numpy\[.*(130|150)|rows_that_are_not"
    ),
    "test_laws.py": r"a_row_that_is_too_short\w+\[(?!sinks)",
    "test_laws_decoding.py": (
        r"weights_of\w+\[(?!in a pool\]|in blocks)|a_prompt_read\w+\[(?!heads in|until\])|a_budget\w+\[(?!h2o)"
        r"|one_block\w+\[(?!h2o)"
    ),
    "test_learn.py": "a_learned_score_is",
    "test_learned.py": "the_policy_reads|blocks_do|examples_are|a_function",
    "test_methods.py": r"sizes_beyond|keys_of|64_bits\w+\[(?!h2o)",
    "test_one_prefill.py": "equal_to",
    "test_own_data.py": "bad_rows",
    "test_peers.py": "jobs_run|rows_are_stored",
    "test_pooled.py": r"own_softmax\w+\[ref|slots_in\w+\[xla-(?!heads of)|heads_that\w+\[ref|bias\[(?!interpret)",
    "test_positions.py": r"methods_see\w+\[keyformer|evicted\w+\[.*ada",
    "test_properties.py": "prompts",
    "test_quest.py": "a_pool|the_slots",
    "test_reader.py": "chunks_are",
    "test_recovery.py": r"recovery_against_numpy\[.*window",
    "test_replay.py": "layers_may|it_keeps|stored_otherwise",
    "test_report.py": "pictures_stand",
    "test_run.py": "question_after|prompts_read|a_config_of|a_policy_and|runs_from",
    "test_scores.py": "capacity|a_sketch|no_head|filters|of_equal|sums",
    "test_select.py": (
        r"chunks_after|what_a_sliding|rows_that|chunks_of_protected\w+\[(33|36)|chunks_whose\w+\[(share|tokens)"
        r"|a_share|chunks_of_a_prompt|what_is_dropped|no_more\w+\[3"
    ),
    "test_session.py": "a_saved|each_of|a_context|an_answer",
    "test_single.py": r"padding\w+\[policy[01]",
    "test_storage.py": r"the_pool\w+\[(?!rank)|by_rank\w+\[(?!H2O by rank\])|blocks_and|heads_keep\w+\[61",
    "test_training.py": "nothing_hidden",
}


def is_slow(file: str, name: str) -> bool:
    """Whether a test of that file is left to CI."""
    name = name.removeprefix("test_")
    if file in ONLY:
        return re.match(ONLY[file], name) is None
    return file in WITHOUT and re.match(WITHOUT[file], name) is not None
