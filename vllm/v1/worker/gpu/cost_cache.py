"""Measured costs on disk, found again while nothing has changed that they depend on."""

import contextlib
import fcntl
import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from vllm import envs, platforms
from vllm.config import VllmConfig
from vllm.config.cost_profile import CostProfile, parse_cost_profile
from vllm.logger import init_logger
from vllm.version import __version__

logger = init_logger(__name__)

_FOLDER = "cost_profiles"


class CostCache:
    """The file of one configuration on one machine.

    Args:
        vllm_config: of the engine.
        device: that it runs on.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._setup = describe_setup(vllm_config, device)
        text = json.dumps(self._setup, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.path = Path(envs.VLLM_CACHE_ROOT) / _FOLDER / f"{name}.json"

    def load(self) -> CostProfile | None:
        """Return what was measured; None if nothing was, or the file is damaged."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("%s is measured again: %s", self.path, error)
            return None
        try:
            document = json.loads(text)
            setup = document.pop("setup")
            profile = parse_cost_profile(document, str(self.path))
        except (
            ValueError,
            AttributeError,
            KeyError,
            TypeError,
            RecursionError,
        ) as error:
            logger.warning(
                "Step costs are measured again, a file is damaged: %s", error
            )
            return None
        return profile if setup == self._setup else None

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Keep others out who measure: servers that start at once disturb each other.

        Yields:
            Whether another one was waited for: the file may be there now.
        """
        with contextlib.ExitStack() as stack:
            has_waited = False
            # A folder that cannot be written, or locked, keeps nobody out.
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(open(self.path.parent / ".lock", "w"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    logger.info("Waiting for another server to measure step costs")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    has_waited = True
            yield has_waited

    def save(self, profile: CostProfile) -> None:
        """Write the file, whole or not at all; a failure is a warning."""
        document = profile.to_json() | {"setup": self._setup}
        # Servers that share the folder may start at once, with equal process ids.
        partial = self.path.with_suffix(f".{uuid.uuid4().hex}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            logger.warning("Step costs cannot be kept for the next start: %s", error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def describe_setup(vllm_config: VllmConfig, device: torch.device) -> dict[str, Any]:
    """Return everything that the costs depend on, as JSON."""
    model_config = vllm_config.model_config
    scheduler_config = vllm_config.scheduler_config
    speculative_config = vllm_config.speculative_config
    assert speculative_config is not None, "costs are measured for speculation"
    operators = sorted(Path(envs.__file__).parent.glob("_C_cpu*.so"))
    return {
        "version": __version__,
        "torch": torch.__version__,
        "device": platforms.device_name(device.type),
        "num_threads": torch.get_num_threads(),
        "operators": {path.name: _fingerprint(path) for path in operators},
        "isa": [envs.VLLM_CPU_ISA, envs.VLLM_CPU_DISABLE_OPS],
        "model": _fingerprint(Path(model_config.model)),
        "dtype": model_config.dtype,
        "quantization": model_config.quantization,
        "sampling": model_config.default_sampling_params,
        "method": speculative_config.method,
        "drafter": speculative_config.model
        and _fingerprint(Path(speculative_config.model)),
        "draft_sample_method": speculative_config.draft_sample_method,
        "num_speculative_tokens": speculative_config.num_speculative_tokens,
        "max_num_seqs": scheduler_config.max_num_seqs,
        "max_num_batched_tokens": scheduler_config.max_num_batched_tokens,
        "max_model_len": model_config.max_model_len,
        "block_size": vllm_config.cache_config.block_size,
        "cache_dtype": vllm_config.cache_config.cache_dtype,
        "curves": [field.name for field in fields(CostProfile)],
        "context_len": envs.VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN,
    }


def _fingerprint(path: Path) -> list[Any]:
    """Return name, size and time of a file, or of every file of a directory."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    facts: list[Any] = [str(path.resolve())]
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            # A link to nothing, or a file that somebody has just removed.
            facts.append([file.name])
        else:
            facts.append([file.name, stat.st_size, stat.st_mtime_ns])
    return facts
