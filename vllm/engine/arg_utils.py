"""From flags and keyword arguments to the engine's configuration, resolved once."""

import argparse
import math
import os
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from vllm import envs
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm.config.cache import CACHE_DTYPES
from vllm.config.load import LOAD_FORMATS
from vllm.config.model import LOGPROBS_MODES, QUANTIZATIONS
from vllm.config.observability import SPEC_DECODE_METRICS_LEVELS
from vllm.config.scheduler import SCHEDULING_POLICIES
from vllm.config.structured_outputs import STRUCTURED_OUTPUTS_BACKENDS
from vllm.engine.checks import check_choice, check_minimum, invalid
from vllm.engine.flags import BLOCK_SIZES, DEVICES, DTYPES, add_engine_flags
from vllm.engine.speculative_args import (
    AUTO,
    check_speculative_config,
    describe_speculation,
    resolve_speculative_config,
)
from vllm.exceptions import CheckpointError, VLLMValidationError
from vllm.logger import init_logger
from vllm.transformers_utils.config import HfConfig
from vllm.utils.suggestions import did_you_mean

logger = init_logger(__name__)

# generation_config.json's word -> the sampling parameter's.
_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# Steps of this many tokens take about a second on a few CPU cores, and keep them busy.
_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
_DEFAULT_SEQS = {"cpu": 64, "cuda": 256}
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class _FoundModel:
    """What `model` stands for.

    Args:
        name: to serve it under.
        path: a directory or a GGUF file.
        drafter: the directory that was named, if it is that of a drafter for the model.
    """

    name: str
    path: str
    drafter: str | None = None


@dataclass
class EngineArgs:
    """Everything that a user can set about an engine; None means "decide for me".

    `vllm serve --help=all` says what each is for: the flag of a field is its name with
    dashes.

    Raises:
        VLLMValidationError: a value is of the wrong type or outside its bounds.
    """

    model: str | None = None
    tokenizer: str | None = None
    served_model_name: str | list[str] | None = None
    dtype: str = "auto"
    quantization: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    trust_remote_code: bool = False
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    chat_template: str | None = None
    load_format: str = "auto"
    use_tqdm_on_load: bool = True
    device: str = "auto"
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    structured_outputs_config: dict[str, Any] | None = None
    speculative_config: dict[str, Any] | str | None = AUTO
    disable_log_stats: bool = False
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    enable_per_request_metrics: bool = False
    per_request_spec_decode_metrics: str = "none"
    enable_dashboard: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        for name, choices in (
            ("dtype", DTYPES),
            ("quantization", QUANTIZATIONS),
            ("device", DEVICES),
            ("load_format", LOAD_FORMATS),
            ("logprobs_mode", LOGPROBS_MODES),
            ("scheduling_policy", SCHEDULING_POLICIES),
            ("block_size", BLOCK_SIZES),
            ("kv_cache_dtype", CACHE_DTYPES),
            ("per_request_spec_decode_metrics", SPEC_DECODE_METRICS_LEVELS),
        ):
            check_choice(name, getattr(self, name), choices)
        for name, minimum in (
            ("max_model_len", 1),
            ("max_logprobs", -1),
            # The null block and one to use.
            ("num_gpu_blocks_override", 2),
            ("kv_cache_memory_bytes", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("seed", -_MAX_SEED - 1),
        ):
            check_minimum(name, getattr(self, name), minimum)
        if self.seed > _MAX_SEED:
            raise invalid("seed", "must fit 64 bits", self.seed)
        share = self.gpu_memory_utilization
        if not (math.isfinite(share) and 0.0 < share <= 1.0):
            raise invalid("gpu_memory_utilization", "must be in (0, 1]", share)
        if self.enable_dashboard and self.disable_log_stats:
            raise invalid(
                "enable_dashboard", "needs statistics, without disable_log_stats", True
            )
        self._structured_outputs_config()
        check_speculative_config(self.speculative_config)
        _check_override(self.override_generation_config or {})

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """Build from keyword arguments.

        Raises:
            TypeError: there is no field of such a name; the closest one is named.
        """
        known = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"unknown engine argument {name!r}{did_you_mean(name, known)}"
                )
        return cls(**kwargs)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the engine's flags to `parser`, and return it."""
        add_engine_flags(parser, cls)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Build from parsed flags; those of other owners in `args` are left alone."""
        names = [field.name for field in fields(cls) if hasattr(args, field.name)]
        return cls(**{name: getattr(args, name) for name in names})

    def create_engine_config(self) -> VllmConfig:
        """Look at the model and the device, and decide what was left open.

        Raises:
            VLLMValidationError: a value does not fit the model or the device.
            CheckpointError: the model is not there, damaged or of an unknown kind.
            UnsupportedError: this build cannot serve it.
        """
        self._check_environment()
        if self.trust_remote_code:
            logger.warning("trust_remote_code has no effect: a model's code never runs")
        device = self._device()
        model = self._find_model()
        model_config = self._model_config(device, model)
        speculative_config = resolve_speculative_config(
            self.speculative_config, model_config, model.drafter
        )
        if speculative_config is not None:
            logger.info("%s", describe_speculation(speculative_config))
        return VllmConfig(
            model_config=model_config,
            cache_config=self._cache_config(device, model_config.dtype),
            scheduler_config=self._scheduler_config(device, model_config.max_model_len),
            device_config=DeviceConfig(device=device),
            load_config=LoadConfig(
                load_format=self.load_format, use_tqdm_on_load=self.use_tqdm_on_load
            ),
            structured_outputs_config=self._structured_outputs_config(),
            speculative_config=speculative_config,
            observability_config=ObservabilityConfig(
                disable_log_stats=self.disable_log_stats,
                enable_log_requests=self.enable_log_requests,
                enable_log_outputs=self.enable_log_outputs,
                enable_per_request_metrics=self.enable_per_request_metrics,
                per_request_spec_decode_metrics=self.per_request_spec_decode_metrics,
                enable_dashboard=self.enable_dashboard,
            ),
        )

    def _device(self) -> str:
        from vllm.platforms import check_device, detect_device

        if self.device == "auto":
            return detect_device()
        check_device(self.device, f"device={self.device}")
        return self.device

    def _check_types(self) -> None:
        allowed: dict[str, tuple[type, ...]] = {
            "str": (str,),
            "int": (int,),
            "float": (int, float),
            "bool": (bool,),
            "str | None": (str, type(None)),
            "int | None": (int, type(None)),
            "str | list[str] | None": (str, list, tuple, type(None)),
            "dict[str, Any] | None": (dict, type(None)),
            "dict[str, Any] | str | None": (dict, str, type(None)),
        }
        for field in fields(self):
            value = getattr(self, field.name)
            kind = str(getattr(field.type, "__name__", field.type))
            if kind not in allowed:
                kind = str(field.type).replace("typing.", "")
            wrong_bool = isinstance(value, bool) and kind != "bool"
            if wrong_bool or not isinstance(value, allowed[kind]):
                raise invalid(field.name, f"must be of type {kind}", value)

    def _check_environment(self) -> None:
        try:
            envs.validate()
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None
        unknown = envs.unknown_variables()
        if unknown:
            logger.warning(
                "Unknown environment variables, without effect: %s", ", ".join(unknown)
            )

    def _find_model(self) -> _FoundModel:
        from vllm.transformers_utils.configs.dspark import find_verifier
        from vllm.transformers_utils.model_files import (
            EMBEDDED_MODEL_NAME,
            resolve_model_path,
        )

        path = resolve_model_path(self.model)
        verifier = find_verifier(path)
        if verifier is None:
            return _FoundModel(self.model or EMBEDDED_MODEL_NAME, path)
        try:
            return _FoundModel(verifier, resolve_model_path(verifier), path)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} is a drafter, whose model: {error}"
            ) from None

    def _model_config(self, device: str, model: _FoundModel) -> ModelConfig:
        from vllm.platforms import default_dtype
        from vllm.transformers_utils.config import (
            load_generation_config,
            load_hf_config,
        )

        path = model.path
        hf_config = load_hf_config(path)
        generation_config = load_generation_config(path)
        return ModelConfig(
            model=path,
            tokenizer=self._tokenizer_path(path),
            served_model_name=self._served_names(model),
            hf_config=hf_config,
            dtype=default_dtype(device, hf_config)
            if self.dtype == "auto"
            else self.dtype,
            quantization=self.quantization,
            max_model_len=self._max_model_len(hf_config),
            seed=self.seed,
            trust_remote_code=self.trust_remote_code,
            max_logprobs=self.max_logprobs,
            logprobs_mode=self.logprobs_mode,
            default_sampling_params=self._default_sampling_params(generation_config),
            # The model's own stop tokens hold whatever the sampling defaults are.
            generation_eos_token_ids=_eos_token_ids(generation_config),
            chat_template=self._chat_template(),
        )

    def _tokenizer_path(self, model_path: str) -> str:
        from vllm.transformers_utils.model_files import resolve_model_path

        if self.tokenizer is None:
            return model_path
        if os.path.exists(self.tokenizer):
            return self.tokenizer
        return resolve_model_path(self.tokenizer)

    def _served_names(self, model: _FoundModel) -> tuple[str, ...]:
        names = self.served_model_name
        if isinstance(names, str):
            return (names,)
        return tuple(names or ()) or (model.name,)

    def _max_model_len(self, hf_config: HfConfig) -> int:
        limit = _max_positions(hf_config)
        wanted = self.max_model_len
        if wanted is None or wanted <= limit:
            return wanted or limit
        if envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
            logger.warning(
                "max_model_len %d is beyond the %d positions that the model was made "
                "for: its text may be wrong there",
                wanted,
                limit,
            )
            return wanted
        raise invalid(
            "max_model_len",
            f"must be at most {limit}, the positions that the model was made for (set "
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 to go beyond at your own risk)",
            wanted,
        )

    def _default_sampling_params(self, of_model: dict[str, Any]) -> dict[str, Any]:
        from vllm.sampling_params import SamplingParams
        from vllm.transformers_utils.config import load_generation_config

        if self.generation_config == "vllm":
            of_model = {}
        elif self.generation_config != "auto":
            of_model = load_generation_config(self.generation_config)
        merged = of_model | (self.override_generation_config or {})
        defaults = {
            name: merged[word]
            for word, name in _GENERATION_FIELDS.items()
            if merged.get(word) is not None
        }
        try:
            SamplingParams(**defaults)
        except VLLMValidationError as error:
            raise VLLMValidationError(
                f"generation_config.json or override_generation_config: {error}; "
                "generation_config 'vllm' leaves the model's own out",
                parameter=error.parameter,
            ) from None
        return defaults

    def _chat_template(self) -> str | None:
        from vllm.transformers_utils.chat_template import check_chat_template

        template = self.chat_template
        if template is None:
            return None
        if "{" not in template and "\n" not in template:
            template = self._read_chat_template(template)
        check_chat_template(template)
        return template

    def _read_chat_template(self, path: str) -> str:
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "is not UTF-8 text"
            raise invalid(
                "chat_template",
                f"must be a readable file or a template: {reason}",
                path,
            ) from None

    def _cache_config(self, device: str, model_dtype: str) -> CacheConfig:
        # The kernels on CUDA read the cache in the dtype of the queries.
        if device == "cuda" and self.kv_cache_dtype not in ("auto", model_dtype):
            raise invalid(
                "kv_cache_dtype",
                f"must be auto or the model's dtype, {model_dtype}, on CUDA",
                self.kv_cache_dtype,
            )
        space_gib = envs.VLLM_CPU_KVCACHE_SPACE if device == "cpu" else 0
        return CacheConfig(
            block_size=self.block_size,
            cache_dtype=self.kv_cache_dtype,
            gpu_memory_utilization=self.gpu_memory_utilization,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            cpu_kvcache_space_bytes=space_gib * 2**30 or None,
            enable_prefix_caching=self.enable_prefix_caching,
        )

    def _scheduler_config(self, device: str, max_model_len: int) -> SchedulerConfig:
        max_num_seqs = self.max_num_seqs
        max_tokens = self.max_num_batched_tokens
        if max_tokens is None:
            max_tokens = max(_DEFAULT_BATCHED_TOKENS[device], max_num_seqs or 0)
            if not self.enable_chunked_prefill:
                max_tokens = max(max_tokens, max_model_len)
        if max_num_seqs is None:
            max_num_seqs = min(_DEFAULT_SEQS[device], max_tokens)
        if max_tokens < max_num_seqs:
            raise invalid(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({max_num_seqs})",
                max_tokens,
            )
        if not self.enable_chunked_prefill and max_tokens < max_model_len:
            raise invalid(
                "max_num_batched_tokens",
                f"must be at least max_model_len ({max_model_len}) without chunked "
                "prefill",
                max_tokens,
            )
        return SchedulerConfig(
            max_num_batched_tokens=max_tokens,
            max_num_seqs=max_num_seqs,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.scheduling_policy,
        )

    def _structured_outputs_config(self) -> StructuredOutputsConfig:
        values = self.structured_outputs_config or {}
        defaults = asdict(StructuredOutputsConfig())
        for key, value in values.items():
            parameter = f"structured_outputs_config.{key}"
            if key not in defaults:
                raise VLLMValidationError(
                    f"unknown key {parameter}{did_you_mean(key, defaults)}",
                    parameter=parameter,
                )
            if key == "backend":
                check_choice(parameter, value, STRUCTURED_OUTPUTS_BACKENDS)
            elif not isinstance(value, bool):
                raise invalid(parameter, "must be true or false", value)
        return StructuredOutputsConfig(**values)


class AsyncEngineArgs(EngineArgs):
    """The same, by the name that callers of `AsyncLLM` use."""


def _check_override(override: dict[str, Any]) -> None:
    for key in override:
        if key not in _GENERATION_FIELDS:
            parameter = f"override_generation_config.{key}"
            raise VLLMValidationError(
                f"unknown key {parameter}{did_you_mean(key, _GENERATION_FIELDS)}",
                parameter=parameter,
            )


def _max_positions(hf_config: HfConfig) -> int:
    """Return the positions that the model was made for, RoPE scaling included."""
    limit = hf_config.max_position_embeddings
    scaling = hf_config.rope_scaling or {}
    if scaling.get("rope_type") != "yarn":
        return limit
    # A YaRN configuration may name the length before or after the extension.
    original = scaling.get("original_max_position_embeddings") or limit
    return max(limit, int(original * scaling["factor"]))


def _eos_token_ids(generation_config: dict[str, Any]) -> tuple[int, ...]:
    ids = generation_config.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
