import json
import subprocess
import sys

import pytest
import torch

from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import CheckpointError, UnsupportedError, VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [2, 3]})
    )
    return str(tmp_path)


def parse(argv):
    parser = FlexibleArgumentParser(prog="tool")
    EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(parser.parse_args(argv))


def create(model, **kwargs):
    return EngineArgs(model=model, device="cpu", **kwargs).create_engine_config()


def test_no_flags_are_the_defaults():
    assert parse([]) == EngineArgs()


def test_flags_reach_their_fields():
    args = parse(
        [
            "--model=m",
            "--max-model-len=32K",
            "--kv-cache-memory-bytes=2G",
            "--kv-cache-dtype=float16",
            "--no-enable-prefix-caching",
            "--served-model-name",
            "a",
            "b",
            "--structured-outputs-config.backend",
            "xgrammar",
            '--override-generation-config={"temperature": 0.5}',
            "--enable-log-requests",
            "--enable-per-request-metrics",
            "--per-request-spec-decode-metrics=detailed",
        ]
    )
    assert args == EngineArgs(
        model="m",
        max_model_len=32768,
        kv_cache_memory_bytes=2 * 2**30,
        kv_cache_dtype="float16",
        enable_prefix_caching=False,
        served_model_name=["a", "b"],
        structured_outputs_config={"backend": "xgrammar"},
        override_generation_config={"temperature": 0.5},
        enable_log_requests=True,
        enable_per_request_metrics=True,
        per_request_spec_decode_metrics="detailed",
    )


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_an_automatic_length_is_none(text):
    assert parse([f"--max-model-len={text}"]).max_model_len is None


def test_every_field_but_the_frontends_has_a_flag():
    parser = FlexibleArgumentParser(prog="tool")
    EngineArgs.add_cli_args(parser)
    names = {action.dest for action in parser._actions}
    assert set(EngineArgs.__dataclass_fields__) - names == {"chat_template"}


def test_unknown_keyword_arguments_name_the_closest_one():
    with pytest.raises(TypeError, match=r"max_seqs.*did you mean max_num_seqs"):
        EngineArgs.from_kwargs(max_seqs=3)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("dtype", "int8"),
        ("device", "tpu"),
        ("load_format", "pickle"),
        ("logprobs_mode", "raw"),
        ("scheduling_policy", "lifo"),
        ("per_request_spec_decode_metrics", "all"),
        ("block_size", 17),
        ("kv_cache_dtype", "fp8"),
        ("max_model_len", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -1),
        ("max_logprobs", -2),
        ("num_gpu_blocks_override", 1),
        ("kv_cache_memory_bytes", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("seed", 2**63),
        ("seed", True),
        ("max_num_seqs", "8"),
        ("enable_prefix_caching", 1),
        ("model", 3),
        ("speculative_config", "on"),
        ("speculative_config", 3),
    ],
)
def test_a_wrong_value_is_refused_by_name(parameter, value):
    with pytest.raises(VLLMValidationError, match=parameter) as raised:
        EngineArgs(**{parameter: value})
    assert raised.value.parameter == parameter


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("structured_outputs_config", {"backnd": "auto"}, "did you mean backend"),
        ("structured_outputs_config", {"backend": "outlines"}, "must be one of auto"),
        ("structured_outputs_config", {"disable_any_whitespace": 1}, "true or false"),
        ("override_generation_config", {"temprature": 1}, "did you mean temperature"),
    ],
)
def test_wrong_keys_of_a_mapping_are_refused(field, value, message):
    with pytest.raises(VLLMValidationError, match=message):
        EngineArgs(**{field: value})


def test_lengths_and_names_default_to_the_models(model_dir):
    config = create(model_dir)
    assert config.model_config.max_model_len == 1024
    assert config.model_config.tokenizer == model_dir
    assert config.model_config.served_model_name == (model_dir,)
    assert config.model_config.dtype == "float32"
    assert config.device_config.device == "cpu"


def test_a_length_beyond_the_models_is_refused_unless_allowed(model_dir, monkeypatch):
    with pytest.raises(VLLMValidationError, match="at most 1024"):
        create(model_dir, max_model_len=2048)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert create(model_dir, max_model_len=2048).model_config.max_model_len == 2048


@pytest.mark.parametrize("original", [None, 1024])
def test_a_yarn_model_is_as_long_as_its_extension(tmp_path, original):
    scaling = {"rope_type": "yarn", "factor": 4.0}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"rope_scaling": scaling}))
    assert create(str(tmp_path)).model_config.max_model_len == 4096


@pytest.mark.parametrize(
    ("kwargs", "defaults"),
    [
        ({}, {"temperature": 0.6, "top_k": 20}),
        ({"generation_config": "vllm"}, {}),
        (
            {"override_generation_config": {"temperature": 0.1, "max_new_tokens": 9}},
            {"temperature": 0.1, "top_k": 20, "max_tokens": 9},
        ),
    ],
)
def test_sampling_defaults_come_from_the_model_and_the_override(
    model_dir, kwargs, defaults
):
    config = create(model_dir, **kwargs).model_config
    assert config.default_sampling_params == defaults
    assert config.generation_eos_token_ids == (2, 3)


def test_a_sampling_default_out_of_bounds_is_refused(model_dir):
    with pytest.raises(VLLMValidationError, match=r"generation_config.*: top_p must"):
        create(model_dir, override_generation_config={"top_p": 2.0})


def test_a_step_is_never_smaller_than_its_requests(model_dir):
    config = create(model_dir, max_num_batched_tokens=16).scheduler_config
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (16, 16)
    with pytest.raises(VLLMValidationError, match="at least max_num_seqs"):
        create(model_dir, max_num_batched_tokens=16, max_num_seqs=17)


def test_whole_prompts_fit_one_step_without_chunked_prefill(model_dir):
    config = create(model_dir, enable_chunked_prefill=False).scheduler_config
    assert config.max_num_batched_tokens == 1024
    with pytest.raises(VLLMValidationError, match="without chunked prefill"):
        create(model_dir, enable_chunked_prefill=False, max_num_batched_tokens=512)


def test_the_cpu_cache_size_comes_from_the_environment(model_dir, monkeypatch):
    assert create(model_dir).cache_config.cpu_kvcache_space_bytes is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert create(model_dir).cache_config.cpu_kvcache_space_bytes == 3 * 2**30


def test_a_chat_template_is_a_text_or_a_file(model_dir, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    for given in (str(path), "{{ messages }}"):
        config = create(model_dir, chat_template=given).model_config
        assert config.chat_template == "{{ messages }}"
    with pytest.raises(VLLMValidationError, match="chat_template"):
        create(model_dir, chat_template=str(tmp_path / "none.jinja"))


def test_a_broken_chat_template_is_refused_before_the_start(model_dir):
    with pytest.raises(VLLMValidationError, match=r"refused: .*\(line 2\)"):
        create(model_dir, chat_template="{{ messages }}\n{% for %}")


def test_a_bad_environment_variable_is_refused(model_dir, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "many")
    with pytest.raises(VLLMValidationError, match="VLLM_CPU_OMP_THREADS_BIND"):
        create(model_dir)


def write_drafter(folder, **changes):
    """Write what is read of a drafter before the start."""
    raw = {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkSpeculator"],
        "transformer_layer_config": MODEL,
        "block_size": 4,
        "mask_token_id": 99,
        "aux_hidden_state_layer_ids": [0],
        "sample_from_anchor": True,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | changes))
    (folder / "model.safetensors").touch()
    return str(folder)


def verified_by(name):
    return {"speculators_config": {"verifier": {"name_or_path": name}}}


@pytest.fixture
def log(monkeypatch):
    lines = []
    monkeypatch.setattr(
        arg_utils.logger, "info", lambda text, *args: lines.append(text % args)
    )
    return lines


def test_the_embedded_model_drafts_by_itself_and_says_so(
    model_dir, tmp_path, embed, log
):
    drafter = write_drafter(tmp_path / "drafter")
    embed(model_dir, drafter)
    for model in (None, "SmolLM2-135M-Instruct", model_dir):
        config = create(model).speculative_config
        assert (config.method, config.model) == ("dspark", drafter)
        assert config.draft_sample_method == "probabilistic"
    assert len(log) == 3
    assert "--speculative-config null turns it off" in log[0]
    assert create(None, speculative_config=None).speculative_config is None
    assert len(log) == 3


def test_null_on_the_command_line_turns_drafts_off(model_dir, tmp_path, embed):
    embed(model_dir, write_drafter(tmp_path / "drafter"))
    config = parse(["--speculative-config", "null"]).create_engine_config()
    assert config.speculative_config is None
    config = parse(["--speculative-config.num_speculative_tokens=3"])
    assert config.create_engine_config().num_speculative_tokens == 3


def test_another_model_drafts_only_when_told_to(model_dir, log):
    assert create(model_dir).speculative_config is None
    assert log == []


def test_a_drafter_serves_the_model_that_it_names(model_dir, tmp_path):
    drafter = write_drafter(tmp_path / "drafter", **verified_by(model_dir))
    config = create(drafter)
    assert config.model_config.model == model_dir
    assert config.model_config.tokenizer == model_dir
    assert config.model_config.served_model_name == (model_dir,)
    assert config.model_config.default_sampling_params["top_k"] == 20
    assert config.speculative_config.model == drafter
    assert create(drafter, served_model_name="x").model_config.served_model_name == (
        "x",
    )
    assert create(drafter, speculative_config=None).speculative_config is None


def test_a_drafter_whose_model_is_not_there_is_not_served(tmp_path):
    drafter = write_drafter(tmp_path / "drafter", **verified_by("/nowhere"))
    message = f"{drafter} is a drafter, whose model: /nowhere: no such file"
    with pytest.raises(CheckpointError, match=message):
        create(drafter)


def test_a_drafter_that_names_no_model_is_not_served(tmp_path):
    drafter = write_drafter(tmp_path / "drafter")
    with pytest.raises(UnsupportedError, match="does not say for which model"):
        create(drafter)


def test_async_arguments_are_engine_arguments():
    assert AsyncEngineArgs(seed=3).seed == 3
    assert issubclass(AsyncEngineArgs, EngineArgs)


def test_flags_need_no_torch():
    code = (
        "import sys; import vllm.engine.arg_utils as a;"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as P;"
        "a.EngineArgs.add_cli_args(P(prog='x')).parse_args([]);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_device_that_is_not_there_is_refused(model_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="device=cuda, but torch sees no CUDA"):
        EngineArgs(model=model_dir, device="cuda").create_engine_config()


def test_a_wrong_cache_dtype_is_refused_with_those_there_are():
    with pytest.raises(VLLMValidationError, match="one of auto, float32, float16"):
        EngineArgs(kv_cache_dtype="float15")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float32", "float16"])
def test_a_cpu_takes_each_cache_dtype(model_dir, kv_cache_dtype):
    config = create(model_dir, kv_cache_dtype=kv_cache_dtype)
    assert config.cache_config.cache_dtype == kv_cache_dtype


def test_cuda_takes_the_cache_in_the_models_dtype_only(model_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def create_on_cuda(kv_cache_dtype):
        args = EngineArgs(
            model=model_dir,
            device="cuda",
            dtype="float16",
            kv_cache_dtype=kv_cache_dtype,
        )
        return args.create_engine_config().cache_config.cache_dtype

    assert [create_on_cuda(dtype) for dtype in ("auto", "float16")] == [
        "auto",
        "float16",
    ]
    with pytest.raises(VLLMValidationError, match="auto or .* float16, on CUDA") as one:
        create_on_cuda("float32")
    assert one.value.parameter == "kv_cache_dtype"
