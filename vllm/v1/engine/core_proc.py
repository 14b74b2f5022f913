"""The engine core in a process of its own: sockets and threads around the steps."""

import faulthandler
import os
import pickle
import queue
import select
import shutil
import signal
import sys
import threading
import time
from typing import Any

import zmq

from vllm.logger import configure_logging, init_logger
from vllm.utils.process_heap import settle_heap
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityResult,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_process import DEAD, OUTPUTS, STARTUP, EngineCoreProcArgs
from vllm.v1.engine.startup import (
    USER_ERRORS,
    StartupClock,
    StartupFailure,
    StartupPhase,
    StartupReport,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

logger = init_logger(__name__)

# Between two steps of which the first could schedule nothing.
_STALLED_STEP_WAIT_S = 0.005
_PARENT_POLL_S = 1.0
_OUTPUT_FLUSH_S = 5.0

# What the front may call by name.
UTILITIES = frozenset({"check_integrity", "reset_prefix_cache"})


class EngineCoreProc:
    """Steps in the main thread; one thread decodes the input, one encodes the output.

    Call `start`, then `run`, then `shutdown`.
    """

    core: EngineCore

    def __init__(self, args: EngineCoreProcArgs) -> None:
        self._args = args
        self._input_queue: queue.SimpleQueue[tuple[EngineCoreRequestType, Any]] = (
            queue.SimpleQueue()
        )
        self._output_queue: queue.SimpleQueue[tuple[bytes, Any] | None] = (
            queue.SimpleQueue()
        )
        self._is_stopping = False
        self._context = zmq.Context()
        self._output_thread = threading.Thread(
            target=self._send_outputs, name="engine-core-output", daemon=True
        )
        self._output_thread.start()

    def start(self) -> None:
        """Build the engine core and report that it is ready, or why it is not.

        Raises:
            Exception: the start has failed; the parent has been told why.
        """
        clock = StartupClock()
        clock.add(StartupPhase("process", time.monotonic() - self._args.start_time))
        try:
            self.core = EngineCore(
                self._args.vllm_config,
                self._args.executor_factory,
                log_stats=self._args.log_stats,
                on_wake_up=self._wake_up,
                clock=clock,
            )
        except Exception as error:
            failure = StartupFailure.from_exception(error)
            self._put(STARTUP, StartupReport(failure=failure))
            self._flush()
            raise
        threading.Thread(
            target=self._receive_inputs, name="engine-core-input", daemon=True
        ).start()
        self._put(STARTUP, StartupReport(ready=self.core.ready))
        self.core.warm_up_grammars()
        settle_heap()

    def stop(self) -> None:
        """Leave the loop after the current step; may be called by a signal handler."""
        self._input_queue.put((EngineCoreRequestType.SHUTDOWN, None))

    def run(self) -> None:
        """Step until told to stop.

        Raises:
            Exception: a step has failed; the front has been told why.
        """
        try:
            while self._handle_inputs():
                self._step()
        except Exception as error:
            self._put(DEAD, StartupFailure.from_exception(error))
            raise
        finally:
            self._flush()

    def shutdown(self) -> None:
        """Free the device."""
        self.core.shutdown()

    def _step(self) -> None:
        outputs = self.core.step()
        if outputs.outputs or outputs.scheduler_stats is not None:
            self._put(OUTPUTS, outputs)
        if self.core.is_stalled and self.core.can_step():
            self._wait_for_input(_STALLED_STEP_WAIT_S)

    def _handle_inputs(self) -> bool:
        """Take what has arrived, waiting while no step is possible; False to stop."""
        while not self._is_stopping:
            while not self._input_queue.empty():
                self._handle_input(*self._input_queue.get())
            if self._is_stopping or self.core.can_step():
                break
            if not self.core.has_requests():
                self.core.check_integrity()
            self._wait_for_input(None)
        return not self._is_stopping

    def _wait_for_input(self, timeout_s: float | None) -> None:
        try:
            item = self._input_queue.get(timeout=timeout_s)
        except queue.Empty:
            return
        self._handle_input(*item)

    def _handle_input(self, kind: EngineCoreRequestType, payload: Any) -> None:
        if kind is EngineCoreRequestType.ADD:
            for request in payload:
                self.core.add_request(request)
        elif kind is EngineCoreRequestType.ABORT:
            self.core.abort_requests(payload)
        elif kind is EngineCoreRequestType.UTILITY and payload is not None:
            self._call_utility(*payload)
        elif kind is EngineCoreRequestType.SHUTDOWN:
            self._is_stopping = True

    def _call_utility(self, call_id: int, method: str, args: list[Any]) -> None:
        result = UtilityResult(call_id)
        if method in UTILITIES:
            try:
                result.result = getattr(self.core, method)(*args)
            except Exception as error:
                logger.exception("Utility %s failed", method)
                result.error = f"{type(error).__name__}: {error}"
        else:
            result.error = f"the engine core has no utility {method!r}"
        self._put(OUTPUTS, EngineCoreOutputs(utility_result=result))

    def _wake_up(self) -> None:
        # A call to nothing: it only ends the wait for input.
        self._input_queue.put((EngineCoreRequestType.UTILITY, None))

    def _put(self, kind: bytes, message: Any) -> None:
        self._output_queue.put((kind, message))

    def _flush(self) -> None:
        self._output_queue.put(None)
        self._output_thread.join(_OUTPUT_FLUSH_S)

    def _send_outputs(self) -> None:
        encoder = MsgpackEncoder()
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        # What is on its way reaches the parent even if this process ends now.
        socket.setsockopt(zmq.LINGER, int(_OUTPUT_FLUSH_S * 1000))
        socket.connect(self._args.output_address)
        while (item := self._output_queue.get()) is not None:
            kind, message = item
            socket.send_multipart([kind, *encoder.encode(message)], copy=True)
        socket.close()

    def _receive_inputs(self) -> None:
        decoders = {
            EngineCoreRequestType.ADD: MsgpackDecoder(list[EngineCoreRequest]),
            EngineCoreRequestType.ABORT: MsgpackDecoder(list[str]),
            EngineCoreRequestType.UTILITY: MsgpackDecoder(tuple[int, str, list[Any]]),
        }
        socket = self._context.socket(zmq.PULL)
        socket.set_hwm(0)
        socket.bind(self._args.input_address)
        while True:
            kind_frame, *frames = socket.recv_multipart()
            kind = EngineCoreRequestType(kind_frame)
            decoder = decoders.get(kind)
            try:
                payload = decoder.decode(frames) if decoder else None
            except Exception:
                # The front has checked every field; nobody can be told about this one.
                logger.exception("A message of kind %s cannot be read", kind.name)
                continue
            self._input_queue.put((kind, payload))


def main() -> None:
    """Run the engine core that the parent describes on the standard input."""
    args = read_args()
    configure_logging(args.process_name)
    faulthandler.enable()
    # An interrupt from the terminal reaches the parent as well, and the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_parent(args.socket_directory)
    try:
        proc = EngineCoreProc(args)
        proc.start()
        signal.signal(signal.SIGTERM, lambda *_: proc.stop())
        proc.run()
        proc.shutdown()
    except USER_ERRORS as error:
        logger.error("%s", StartupFailure.from_exception(error).message)
        sys.exit(1)
    except Exception:
        logger.exception("The engine core has failed")
        sys.exit(1)


def read_args() -> EngineCoreProcArgs:
    """Read the pickled arguments; the rest of the input stays open until the end."""
    stdin = sys.stdin.buffer
    num_bytes = int.from_bytes(stdin.read(8), "little")
    return pickle.loads(stdin.read(num_bytes))


def watch_parent(socket_directory: str) -> None:
    """End this process when its parent is gone, whatever it is doing.

    Args:
        socket_directory: the parent's, which a parent that was killed leaves behind.
    """
    parent_pid = os.getppid()

    def watch() -> None:
        while os.getppid() == parent_pid:
            readable, _, _ = select.select([0], [], [], _PARENT_POLL_S)
            # The parent holds the other end of the pipe and never writes again.
            if readable and not os.read(0, 1):
                break
        shutil.rmtree(socket_directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="engine-core-watchdog", daemon=True).start()
