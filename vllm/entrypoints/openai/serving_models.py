"""The names that the server answers to."""

import hashlib
import time
import uuid

from vllm.config import VllmConfig
from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.protocol.tokenization import (
    ModelCard,
    ModelList,
    ModelPermission,
)
from vllm.version import __version__


class OpenAIServingModels:
    """The served model by all its names.

    Args:
        system_fingerprint: changes when an answer to the same request may change.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = vllm_config.model_config
        self.names = config.served_model_name
        self.max_model_len = config.max_model_len
        self._created = int(time.time())
        described = repr(
            (config.hf_config, config.dtype, config.max_model_len, config.seed)
        )
        digest = hashlib.blake2b(described.encode(), digest_size=4).hexdigest()
        self.system_fingerprint = f"vllm-{__version__}-{digest}"

    def resolve(self, name: str | None) -> str:
        """Return the name to answer under: the one asked for, else the first.

        Raises:
            ApiError: 404, no model has this name.
        """
        if not name:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404, "NotFoundError", f"The model `{name}` does not exist.", "model"
            )
        return name

    def show(self, name: str) -> ModelCard:
        """Return what is known of one name.

        Raises:
            ApiError: 404, no model has this name.
        """
        name = self.resolve(name)
        permission = ModelPermission(
            id=f"modelperm-{uuid.uuid4().hex}", created=self._created
        )
        return ModelCard(
            id=name,
            created=self._created,
            # The first name and not a path, which would tell of this machine's files.
            root=self.names[0],
            max_model_len=self.max_model_len,
            permission=[permission],
        )

    def list(self) -> ModelList:
        """Return all names."""
        return ModelList([self.show(name) for name in self.names])
