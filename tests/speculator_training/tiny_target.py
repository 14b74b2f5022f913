"""A tiny random model with a chat template, and the flags of a quick training."""

import json
from pathlib import Path

from tests.model_executor.hf_reference import tiny_model
from tests.v1.engine.fakes import EOS, make_tokenizer, save_tokenizer

NUM_PADDED_IDS = 4
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + EOS + "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUICK = {
    "num-prompts": 24,
    "max-prompt-tokens": 12,
    "max-answer-tokens": 40,
    "num-draft-tokens": 3,
    "markov-rank": 8,
    "draft-vocab-size": 64,
    "held-out-ratio": 0.25,
    "checkpoint-steps": 3,
    "num-epochs": 3,
    "batch-size": 4,
    "num-anchors": 8,
    "kv-cache-memory-bytes": "16M",
}


def save_target(folder: Path, template: str | None = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = make_tokenizer().get_vocab_size() + NUM_PADDED_IDS
    model = tiny_model("llama", vocab_size=vocab_size, num_hidden_layers=4)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if template is not None:
        config["chat_template"] = template
    path.write_text(json.dumps(config))
    return folder


def command(name: str, target: Path, **flags: object) -> list[str]:
    """Return the arguments of a `vllm speculator` command; None leaves a flag out."""
    argv = ["speculator", name, "--model", str(target), "--device", "cpu"]
    for flag, value in flags.items():
        if value is None:
            continue
        argv.append(f"--{flag.replace('_', '-')}")
        if value is not True:
            argv.append(str(value))
    return argv
