"""The models and data sets of the papers, and where they can be had.

Average lengths and numbers of rows of LongBench's English sets are Ada-KV's Table 3. Nothing here was downloaded where
kvjax is developed.
"""

import dataclasses
from typing import Final, Literal

Runner = Literal["harness", "rows", "text", "speed"]


@dataclasses.dataclass(frozen=True)
class Model:
    """A paper's model.

    Attributes:
      title: as papers name it.
      preset: its name in `models.PRESETS`; None where no repository is certain.
      layers, width, kv_heads: its shape, by which a checkpoint is known to be of the size that the paper ran. The shape
        does not tell fine-tuned weights from others.
    """

    title: str
    preset: str | None
    layers: int
    width: int
    kv_heads: int


MODELS: Final[dict[str, Model]] = {
    "mistral-7b-instruct-v0.2": Model("Mistral-7B-Instruct-v0.2", "mistral-7b-instruct-v0.2", 32, 4096, 8),
    "lwm-text-chat-1m": Model("LWM-Text-Chat-1M", "lwm-text-chat-1m", 32, 4096, 32),
    "llama-2-7b": Model("LLaMA2-7B-base", "llama-2-7b", 32, 4096, 32),
    "llama-2-7b-chat": Model("LLaMA2-7B-Chat", "llama-2-7b-chat", 32, 4096, 32),
    "llama-2-13b-chat": Model("LLaMA2-13B-Chat", "llama-2-13b-chat", 40, 5120, 40),
    "wizardlm-7b": Model("WizardLM-7B", None, 32, 4096, 32),
    "zephyr-7b": Model("Zephyr-7B", "zephyr-7b", 32, 4096, 8),
    "llama-3-8b-instruct": Model("LLaMA3-8B-Inst", "llama-3-8b-instruct", 32, 4096, 8),
    "qwen2-1.5b-instruct": Model("Qwen2-1.5B-Inst", "qwen2-1.5b-instruct", 28, 1536, 2),
    "qwen2-7b-instruct": Model("Qwen2-7B-Inst", "qwen2-7b-instruct", 28, 3584, 4),
    "qwen1.5-4b-chat": Model("Qwen1.5-4B-Chat", "qwen1.5-4b-chat", 40, 2560, 20),
    "qwen1.5-14b-chat": Model("Qwen1.5-14B-Chat", "qwen1.5-14b-chat", 40, 5120, 40),
    "gemma-7b-it": Model("Gemma-7B-Inst", "gemma-7b-it", 28, 3072, 16),
    "gpt-j-6b": Model("GPT-J-6B", "gpt-j-6b", 28, 4096, 16),
    "cerebras-gpt-6.7b": Model("Cerebras-GPT-6.7B", "cerebras-gpt-6.7b", 32, 4096, 32),
    "mpt-7b": Model("MPT-7B", "mpt-7b", 32, 4096, 32),
    "mpt-7b-chat": Model("MPT-7B-Chat", "mpt-7b-chat", 32, 4096, 32),
    "mpt-7b-storywriter": Model("MPT-7B-StoryWriter", "mpt-7b-storywriter", 32, 4096, 32),
}


@dataclasses.dataclass(frozen=True)
class DataSet:
    """What prompts are made of.

    Attributes:
      title: as papers name it.
      runner: "rows" are prompts with answers, generated for; "text" is predicted; "harness" is a task of lm-eval that
        ranks given answers; "speed" is made of any tokens.
      examples: how many the papers ran; None where their text does not say.
      words: average words of a prompt, where the text says.
      new_tokens: tokens to generate.
      batch: sequences that are timed together.
      hub: where it is on the hub.
      task: its name in lm-eval.
      stop: strings that end an answer.
    """

    title: str
    runner: Runner
    examples: int | None = None
    words: int | None = None
    new_tokens: int = 0
    batch: int = 1
    hub: str | None = None
    task: str | None = None
    stop: tuple[str, ...] = ()


def _longbench(title: str, name: str, new_tokens: int, words: int | None, examples: int = 200) -> DataSet:
    stop = ("\n",) if name == "samsum" else ()
    return DataSet(title, "rows", examples, words, new_tokens, hub="THUDM/LongBench", stop=stop)


DATA: Final[dict[str, DataSet]] = {
    "narrativeqa": _longbench("NarrativeQA", "narrativeqa", 128, 18_409),
    "qasper": _longbench("Qasper", "qasper", 128, 3_619),
    "multifieldqa_en": _longbench("MultiFieldQA-en", "multifieldqa_en", 64, 4_559, 150),
    "multifieldqa_zh": _longbench("MultiFieldQA-zh", "multifieldqa_zh", 64, None),
    "hotpotqa": _longbench("HotpotQA", "hotpotqa", 32, 9_151),
    "2wikimqa": _longbench("2WikiMultihopQA", "2wikimqa", 32, 4_887),
    "musique": _longbench("MuSiQue", "musique", 32, 11_214),
    "dureader": _longbench("DuReader", "dureader", 128, None),
    "gov_report": _longbench("GovReport", "gov_report", 512, 8_734),
    "qmsum": _longbench("QMSum", "qmsum", 512, 10_614),
    "multi_news": _longbench("MultiNews", "multi_news", 512, 2_113),
    "vcsum": _longbench("VCSUM", "vcsum", 512, None),
    "trec": _longbench("TREC", "trec", 64, 5_177),
    "triviaqa": _longbench("TriviaQA", "triviaqa", 32, 8_209),
    "samsum": _longbench("SAMSum", "samsum", 128, 6_258),
    "lsht": _longbench("LSHT", "lsht", 64, None),
    "passage_count": _longbench("PassageCount", "passage_count", 32, 11_141),
    "passage_retrieval_en": _longbench("PassageRetrieval-en", "passage_retrieval_en", 32, 9_289),
    "passage_retrieval_zh": _longbench("PassageRetrieval-zh", "passage_retrieval_zh", 32, None),
    "lcc": _longbench("LCC", "lcc", 64, 1_235, 500),
    "repobench-p": _longbench("RepoBench-P", "repobench-p", 64, 4_206, 500),
    "needle": DataSet("Needle in a haystack", "rows", new_tokens=64),
    "cnn_dailymail": DataSet("CNN/DailyMail", "rows", 1_000, None, 128, hub="abisee/cnn_dailymail"),
    "cnn_dailymail_context": DataSet(
        "CNN/DailyMail, its context to be repeated", "rows", None, None, 512, hub="abisee/cnn_dailymail"
    ),
    "xsum": DataSet("XSum", "rows", None, None, 128, hub="EdinburghNLP/xsum"),
    "gov_report_summaries": DataSet(
        "GovReport (validation)", "rows", None, None, 512, hub="ccdv/govreport-summarization"
    ),
    "soda": DataSet("SODA", "rows", None, None, 64, hub="allenai/soda"),
    "alpaca_eval": DataSet("AlpacaEval", "rows", 805, None, 512, hub="tatsu-lab/alpaca_eval"),
    "openwebtext": DataSet("OpenWebText", "text", 200, None, 0, hub="Skylion007/openwebtext"),
    "openbookqa_text": DataSet("OpenBookQA, as text", "text", None, None, 0, hub="allenai/openbookqa"),
    "piqa": DataSet("PIQA", "harness", task="piqa"),
    "copa": DataSet("COPA", "harness", task="copa"),
    "openbookqa": DataSet("OpenBookQA", "harness", task="openbookqa"),
    "winogrande": DataSet("WinoGrande", "harness", task="winogrande"),
    "sciq": DataSet("SciQ", "harness", task="sciq"),
    "arc_easy": DataSet("ARC-E", "harness", task="arc_easy"),
    "arc_challenge": DataSet("ARC-C", "harness", task="arc_challenge"),
    "wic": DataSet("WiC", "harness", task="wic"),
    "speed_1024": DataSet("1024 + 1024 tokens", "speed", words=1_024, new_tokens=1_024),
    "speed_2048": DataSet("2048 + 2048 tokens", "speed", words=2_048, new_tokens=2_048),
    "speed_4096": DataSet("4096 + 4096 tokens", "speed", words=4_096, new_tokens=4_096),
    "speed_4096_batch_2": DataSet("4096 + 4096 tokens, two at once", "speed", words=4_096, new_tokens=4_096, batch=2),
    "speed_4k": DataSet("4096 + 512 tokens, four at once", "speed", words=4_096, new_tokens=512, batch=4),
    "speed_32k": DataSet("32K + 512 tokens", "speed", words=32_768, new_tokens=512),
}
