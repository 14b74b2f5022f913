"""The engine's command-line flags, in groups named after the configuration they set."""

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.config.cache import CACHE_DTYPES
from vllm.config.load import LOAD_FORMATS
from vllm.config.model import LOGPROBS_MODES, QUANTIZATIONS
from vllm.config.observability import SPEC_DECODE_METRICS_LEVELS
from vllm.config.scheduler import SCHEDULING_POLICIES
from vllm.utils.argparse_utils import human_int, json_mapping, json_mapping_or_word

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
BLOCK_SIZES = (8, 16, 32, 64, 128)


class _Group:
    """Adds flags whose defaults are those of the `EngineArgs` field of that name."""

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        args_class: "type[EngineArgs]",
        title: str,
        description: str,
    ) -> None:
        self._group = parser.add_argument_group(title, description)
        self._defaults = {field.name: field.default for field in fields(args_class)}

    def add(self, flag: str, help_text: str, **kwargs: Any) -> None:
        """Add one flag; None as default is said in words by `help_text`."""
        default = self._defaults[flag[2:].replace("-", "_")]
        if default is not None and default is not False:
            help_text += " (default: %(default)s)"
        self._group.add_argument(flag, default=default, help=help_text, **kwargs)

    def add_switch(self, flag: str, help_text: str) -> None:
        """Add `--x` and `--no-x`."""
        name = flag[2:].replace("-", "_")
        state = "on" if self._defaults[name] else "off"
        self._group.add_argument(
            flag,
            action=argparse.BooleanOptionalAction,
            default=self._defaults[name],
            help=f"{help_text} (default: {state})",
        )


def max_model_len(text: str) -> int | None:
    """Read `auto`, -1 or an integer; None means the model's own length."""
    return None if text in ("auto", "-1") else human_int(text)


def add_engine_flags(
    parser: argparse.ArgumentParser, args_class: "type[EngineArgs]"
) -> None:
    """Add a flag for each field of `args_class` that a command line can set."""

    def group(title: str, description: str) -> _Group:
        return _Group(parser, args_class, title, description)

    _add_model_flags(group("ModelConfig", "Which model is served, and its limits."))
    _add_load_flags(group("LoadConfig", "Where the weights come from."))
    group("DeviceConfig", "Where the model runs.").add(
        "--device", "auto is a CUDA device if there is one, else cpu", choices=DEVICES
    )
    _add_cache_flags(group("CacheConfig", "Size and policy of the KV cache."))
    _add_scheduler_flags(group("SchedulerConfig", "How requests share the steps."))
    group("StructuredOutputsConfig", "Defaults of structured output.").add(
        "--structured-outputs-config",
        "JSON with the keys backend (auto, guidance, xgrammar), disable_any_whitespace "
        "and disable_additional_properties; also dotted: "
        "--structured-outputs-config.backend xgrammar",
        type=json_mapping,
        metavar="JSON",
    )
    group("SpeculativeConfig", "Who drafts, and how drafts are verified.").add(
        "--speculative-config",
        "JSON with the keys method (ngram, draft_model, dspark, dflash), "
        "num_speculative_tokens, model, draft_sample_method, rejection_sample_method "
        "and others; null for no drafts; auto: those of the embedded model's own "
        "drafter, none for another model; also dotted: "
        "--speculative-config.method ngram",
        type=json_mapping_or_word,
        metavar="JSON",
    )
    _add_observability_flags(group("ObservabilityConfig", "What the engine tells."))


def _add_model_flags(group: _Group) -> None:
    group.add(
        "--model",
        "a Hugging Face directory, a GGUF file or a hub name; without it the embedded "
        "SmolLM2-135M-Instruct",
    )
    group.add("--tokenizer", "directory, tokenizer.json or GGUF file; default: --model")
    group.add(
        "--served-model-name",
        "names that the API answers to, the first is shown; default: --model",
        nargs="+",
        metavar="NAME",
    )
    group.add(
        "--dtype", "of weights and activations; auto: fast and right", choices=DTYPES
    )
    group.add(
        "--quantization",
        "of weights: gguf keeps the blocks of a GGUF file, int8 rounds matrices, none "
        "dequantises; auto is gguf where it is fast, else none",
        choices=QUANTIZATIONS,
    )
    group.add(
        "--max-model-len",
        "prompt and output together, tokens; auto: what the model was made for",
        type=max_model_len,
        metavar="TOKENS",
    )
    group.add("--seed", "of dummy weights and unseeded requests", type=int)
    group.add(
        "--trust-remote-code",
        "has no effect: code of a model directory is never run",
        action="store_true",
    )
    group.add(
        "--generation-config",
        "defaults of sampling parameters: auto (the model's generation_config.json), "
        "vllm (none), or a directory",
        metavar="SOURCE",
    )
    group.add(
        "--override-generation-config",
        'JSON over those defaults, such as {"temperature": 0.5}',
        type=json_mapping,
        metavar="JSON",
    )
    group.add(
        "--max-logprobs",
        "most candidates a request may ask for; -1: the vocabulary",
        type=human_int,
        metavar="N",
    )
    group.add(
        "--logprobs-mode",
        "raw is the model's own distribution, processed is after all parameters",
        choices=LOGPROBS_MODES,
    )


def _add_load_flags(group: _Group) -> None:
    group.add(
        "--load-format",
        "auto looks at the files; dummy draws random weights",
        choices=LOAD_FORMATS,
    )
    group.add_switch("--use-tqdm-on-load", "show a progress bar while loading")


def _add_cache_flags(group: _Group) -> None:
    group.add("--block-size", "tokens a block", type=int, choices=BLOCK_SIZES)
    group.add(
        "--kv-cache-dtype",
        "of keys and values; auto: the model's dtype",
        choices=CACHE_DTYPES,
    )
    group.add(
        "--gpu-memory-utilization",
        "share of the device's memory for weights and cache; on CPU, of what is free, "
        "for the cache",
        type=float,
        metavar="SHARE",
    )
    group.add(
        "--num-gpu-blocks-override",
        "blocks of the cache, whatever the memory says",
        type=human_int,
        metavar="N",
    )
    group.add(
        "--kv-cache-memory-bytes",
        "memory of the cache, such as 2G; before --gpu-memory-utilization and "
        "VLLM_CPU_KVCACHE_SPACE",
        type=human_int,
        metavar="BYTES",
    )
    group.add_switch(
        "--enable-prefix-caching", "reuse the blocks of equal prompt beginnings"
    )


def _add_scheduler_flags(group: _Group) -> None:
    group.add(
        "--max-num-seqs",
        "requests of a step; default: 64 on CPU, 256 on CUDA",
        type=human_int,
        metavar="N",
    )
    group.add(
        "--max-num-batched-tokens",
        "tokens of a step; default: 512 on CPU, 8192 on CUDA",
        type=human_int,
        metavar="TOKENS",
    )
    group.add_switch("--enable-chunked-prefill", "spread long prompts over steps")
    group.add(
        "--scheduling-policy",
        "priority: lower `priority` of a request first",
        choices=SCHEDULING_POLICIES,
    )


def _add_observability_flags(group: _Group) -> None:
    group.add(
        "--disable-log-stats",
        "no statistics in the log and in /metrics",
        action="store_true",
    )
    group.add("--enable-log-requests", "log each request", action="store_true")
    group.add("--enable-log-outputs", "log each finished output", action="store_true")
    group.add(
        "--enable-per-request-metrics",
        "tell in `metrics` of each answer how long its request took",
        action="store_true",
    )
    group.add(
        "--per-request-spec-decode-metrics",
        "tell in `metrics` of each answer what became of its drafts: in sum, or "
        "detailed with the numbers of each step",
        choices=SPEC_DECODE_METRICS_LEVELS,
    )
    group.add(
        "--enable-dashboard",
        "serve a page at /dashboard that shows what speculation does; it shows the "
        "texts of the last answers to whoever may read it",
        action="store_true",
    )
