"""Where the weights come from."""

from dataclasses import dataclass

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True)
class LoadConfig:
    """How weights are loaded.

    Args:
        load_format: one of LOAD_FORMATS; auto looks at the files. dummy draws small
            random weights from ModelConfig.seed.
        use_tqdm_on_load: show a progress bar.
    """

    load_format: str = "auto"
    use_tqdm_on_load: bool = True
