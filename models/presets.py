"""Names of the models that the papers ran, with how they put a text to them, and of models since.

A preset says where a model is, not that it was tried here: none of these could be downloaded where kvjax is developed.
Revisions are the branch "main" throughout, since no paper names a commit; write "name@commit" to hold one fast.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Final

PLACE: Final = "{prompt}"


@dataclasses.dataclass(frozen=True)
class Preset:
    """Where a model is on the hub, and the template that the papers gave it.

    Attributes:
      repository: "owner/name".
      revision: a branch or a commit.
      template: a prompt with `{prompt}` where the text goes; the text alone where the papers show none. Chat models
        have their own in `tokenizer.apply_chat_template`.
    """

    repository: str
    revision: str = "main"
    template: str = PLACE

    def prompt(self, text: str) -> str:
        """The text in the template. A tokenizer adds BOS by itself."""
        return self.template.replace(PLACE, text)


# RoCo (arXiv 2402.06262), appendix, "Prompt Template"; line breaks are those of the models' authors.
_LLAMA_2_CHAT = (
    "[INST] <<SYS>>\n"
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe. "
    "Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal content. "
    "Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering something "
    "not correct. If you don't know the answer to a question, please don't share false information.\n"
    "<</SYS>>\n\n{prompt} [/INST]"
)
_ZEPHYR = (
    "<|system|>\nYou are a friendly chatbot who always responds in a helpful and detailed manner to the user's "
    "questions.</s>\n<|user|>\n{prompt}</s>\n<|assistant|>\n"
)

PRESETS: Final[dict[str, Preset]] = {
    # NaCl, AhaKV, RoCo
    "llama-2-7b": Preset("meta-llama/Llama-2-7b-hf"),
    "llama-2-7b-chat": Preset("meta-llama/Llama-2-7b-chat-hf", template=_LLAMA_2_CHAT),
    "llama-2-13b-chat": Preset("meta-llama/Llama-2-13b-chat-hf", template=_LLAMA_2_CHAT),
    "zephyr-7b": Preset("HuggingFaceH4/zephyr-7b-beta", template=_ZEPHYR),
    # Ada-KV; its scripts give Mistral raw prompts
    "mistral-7b-instruct-v0.2": Preset("mistralai/Mistral-7B-Instruct-v0.2"),
    "lwm-text-chat-1m": Preset("LargeWorldModel/LWM-Text-Chat-1M"),
    # AhaKV
    "llama-3-8b-instruct": Preset("meta-llama/Meta-Llama-3-8B-Instruct"),
    "qwen2-1.5b-instruct": Preset("Qwen/Qwen2-1.5B-Instruct"),
    "qwen2-7b-instruct": Preset("Qwen/Qwen2-7B-Instruct"),
    "qwen1.5-4b-chat": Preset("Qwen/Qwen1.5-4B-Chat"),
    "qwen1.5-14b-chat": Preset("Qwen/Qwen1.5-14B-Chat"),
    "gemma-7b-it": Preset("google/gemma-7b-it"),
    # Keyformer
    "gpt-j-6b": Preset("EleutherAI/gpt-j-6b"),
    "cerebras-gpt-6.7b": Preset("cerebras/Cerebras-GPT-6.7B"),
    "mpt-7b": Preset("mosaicml/mpt-7b"),
    "mpt-7b-chat": Preset("mosaicml/mpt-7b-chat"),
    "mpt-7b-storywriter": Preset("mosaicml/mpt-7b-storywriter"),
    # what later comparisons of the same methods run
    "llama-3-8b": Preset("meta-llama/Meta-Llama-3-8B"),
    "llama-3.1-8b": Preset("meta-llama/Llama-3.1-8B"),
    "llama-3.1-8b-instruct": Preset("meta-llama/Llama-3.1-8B-Instruct"),
    "mistral-7b-instruct-v0.3": Preset("mistralai/Mistral-7B-Instruct-v0.3"),
    "qwen3-0.6b": Preset("Qwen/Qwen3-0.6B"),
    "qwen3-8b": Preset("Qwen/Qwen3-8B"),
    # a size of each family since
    "gpt-oss-20b": Preset("openai/gpt-oss-20b"),
    "gpt-oss-120b": Preset("openai/gpt-oss-120b"),
    "command-r7b": Preset("CohereLabs/c4ai-command-r7b-12-2024"),
    "smollm3-3b": Preset("HuggingFaceTB/SmolLM3-3B"),
    "olmo-2-7b-instruct": Preset("allenai/OLMo-2-1124-7B-Instruct"),
    "olmo-3-7b-instruct": Preset("allenai/Olmo-3-7B-Instruct"),
    "mistral-small-3-24b-instruct": Preset("mistralai/Mistral-Small-24B-Instruct-2501"),
    "ministral-3-8b": Preset("mistralai/Ministral-3-8B-Base-2512"),
    "qwen3.5-9b": Preset("Qwen/Qwen3.5-9B"),
    "qwen3-next-80b-a3b-instruct": Preset("Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "lfm2-1.2b": Preset("LiquidAI/LFM2-1.2B"),
    "glm-4-9b": Preset("zai-org/GLM-4-9B-0414"),
    "glm-4.5-air": Preset("zai-org/GLM-4.5-Air"),
    "glm-4.7-flash": Preset("zai-org/GLM-4.7-Flash"),
    "gemma-4-e2b-it": Preset("google/gemma-4-E2B-it"),
    "gemma-4-e4b-it": Preset("google/gemma-4-E4B-it"),
    "gemma-4-31b-it": Preset("google/gemma-4-31B-it"),
    "gemma-4-26b-a4b-it": Preset("google/gemma-4-26B-A4B-it"),
    "deepseek-v3": Preset("deepseek-ai/DeepSeek-V3"),
    "kimi-k2-instruct": Preset("moonshotai/Kimi-K2-Instruct"),
}


def preset(name: str, others: Iterable[str] = ()) -> Preset:
    """The preset of a name, in any case; `others` are names that are suggested too.

    Raises:
      ValueError: an unknown name, with those that come near.
    """
    found = PRESETS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        near = difflib.get_close_matches(str(name).lower(), [*PRESETS, *others], n=4, cutoff=0.5)
        shown = f"near ones are {near}" if near else f"there are {sorted(PRESETS)}"
        raise ValueError(
            f"{name} is neither a directory nor a hub id like 'owner/name', and no preset has that name; {shown}"
        )
    return found
