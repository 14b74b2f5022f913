"""How the front reaches the engine core: by a call, or over sockets to its process."""

import asyncio
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityResult,
)
from vllm.v1.engine.core_process import DEAD, EngineCoreProcess, ExecutorFactory
from vllm.v1.engine.startup import EngineCoreReady, StartupFailure
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

# A grammar that never reports back would otherwise hold the caller forever.
_IDLE_POLL_S = 1.0


class EngineCoreClient(ABC):
    """An engine core, wherever it runs."""

    ready: EngineCoreReady

    @abstractmethod
    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queue sequences; those of one call are scheduled together if they fit."""

    @abstractmethod
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Stop sequences; unknown ids are ignored."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine core; safe to call twice."""


class SyncEngineCoreClient(EngineCoreClient):
    """A client for callers that step."""

    @staticmethod
    def make(
        vllm_config: VllmConfig,
        executor_factory: ExecutorFactory | None = None,
        *,
        log_stats: bool,
    ) -> "SyncEngineCoreClient":
        """Start an engine core, in this process unless the environment says not."""
        if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            return SyncMPClient(vllm_config, executor_factory, log_stats=log_stats)
        return InprocClient(vllm_config, executor_factory, log_stats=log_stats)

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """Return what the next step gives; waits while no step is possible."""

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core by name and return its answer."""


class InprocClient(SyncEngineCoreClient):
    """The engine core in this process and thread."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_factory: ExecutorFactory | None = None,
        *,
        log_stats: bool,
    ) -> None:
        # Imported here: a front with the core in another process never needs it.
        from vllm.v1.engine.core import EngineCore

        self._wake_up = threading.Event()
        self._is_shut_down = False
        self._core = EngineCore(
            vllm_config,
            executor_factory,
            log_stats=log_stats,
            on_wake_up=self._wake_up.set,
        )
        self.ready = self._core.ready

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            self._core.add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._core.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        while not self._core.can_step() and self._core.has_requests():
            self._wake_up.wait(_IDLE_POLL_S)
            self._wake_up.clear()
        return self._core.step()

    def call_utility(self, method: str, *args: Any) -> Any:
        return getattr(self._core, method)(*args)

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._core.shutdown()


class _MPClient(EngineCoreClient):
    """What both clients of an engine-core process share: messages to it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_factory: ExecutorFactory | None,
        *,
        log_stats: bool,
    ) -> None:
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._failure_decoder = MsgpackDecoder(StartupFailure)
        self._call_ids = itertools.count()
        self._process = EngineCoreProcess(vllm_config, executor_factory, log_stats)
        self.ready = self._process.wait_until_ready()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self._send(EngineCoreRequestType.ADD, list(requests))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._send(EngineCoreRequestType.ABORT, list(request_ids))

    def shutdown(self) -> None:
        self._process.shutdown()

    def _send(self, kind: EngineCoreRequestType, message: Any) -> None:
        if not self._process.is_alive:
            raise EngineDeadError(self._process.death_reason)
        frames = self._encoder.encode(message)
        self._process.input_socket.send_multipart([kind.value, *frames])

    def _send_call(self, method: str, args: tuple[Any, ...]) -> int:
        call_id = next(self._call_ids)
        self._send(EngineCoreRequestType.UTILITY, (call_id, method, args))
        return call_id

    def _decode(self, frames: Sequence[bytes]) -> EngineCoreOutputs:
        kind, *rest = frames
        if kind == DEAD:
            raise EngineDeadError(self._failure_decoder.decode(rest).reason)
        return self._decoder.decode(rest)


class SyncMPClient(_MPClient, SyncEngineCoreClient):
    """The engine core in a process, for callers that step."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_factory: ExecutorFactory | None = None,
        *,
        log_stats: bool,
    ) -> None:
        super().__init__(vllm_config, executor_factory, log_stats=log_stats)
        # Outputs that came while a utility's answer was awaited.
        self._early_outputs: list[EngineCoreOutputs] = []

    def get_output(self) -> EngineCoreOutputs:
        if self._early_outputs:
            return self._early_outputs.pop(0)
        return self._receive()

    def call_utility(self, method: str, *args: Any) -> Any:
        call_id = self._send_call(method, args)
        while True:
            outputs = self._receive()
            result = outputs.utility_result
            if result is not None and result.call_id == call_id:
                return _unwrap(result)
            self._early_outputs.append(outputs)

    def _receive(self) -> EngineCoreOutputs:
        return self._decode(self._process.output_socket.recv_multipart())


class AsyncMPClient(_MPClient):
    """The engine core in a process, for an event loop.

    Construction blocks until the process is ready and may happen in any thread; every
    other call belongs to one event loop.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_factory: ExecutorFactory | None = None,
        *,
        log_stats: bool,
    ) -> None:
        super().__init__(vllm_config, executor_factory, log_stats=log_stats)
        self._async_socket: zmq.asyncio.Socket | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}

    def shutdown(self) -> None:
        if self._async_socket is not None:
            # The loop must forget the file descriptor before its number is used again.
            self._async_socket.close(linger=0)
            self._async_socket = None
        super().shutdown()

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the next outputs.

        Raises:
            EngineDeadError: the process has ended.
        """
        if self._async_socket is None:
            self._async_socket = zmq.asyncio.Socket.from_socket(
                self._process.output_socket
            )
        socket = self._async_socket
        while True:
            outputs = self._decode(await socket.recv_multipart())
            if outputs.utility_result is None:
                return outputs
            self._resolve(outputs.utility_result)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core; needs a running `get_output_async`."""
        future = asyncio.get_running_loop().create_future()
        call_id = self._send_call(method, args)
        self._calls[call_id] = future
        try:
            return await future
        finally:
            del self._calls[call_id]

    def fail_calls(self, error: Exception) -> None:
        """End every waiting call with `error`: no answer will come."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _resolve(self, result: UtilityResult) -> None:
        future = self._calls.get(result.call_id)
        if future is None or future.done():
            return
        try:
            future.set_result(_unwrap(result))
        except RuntimeError as error:
            future.set_exception(error)


def _unwrap(result: UtilityResult) -> Any:
    if result.error is not None:
        raise RuntimeError(result.error)
    return result.result
