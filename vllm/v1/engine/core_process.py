"""The parent's side of an engine-core process: start, wait, watch, end.

The process is not started by `multiprocessing`, which would run the caller's main
module again.
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.startup import (
    EngineCoreReady,
    StartupFailure,
    StartupReport,
    format_phases,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

if TYPE_CHECKING:
    from vllm.v1.executor.abstract import Executor

logger = init_logger(__name__)

ExecutorFactory = Callable[[VllmConfig], "Executor"]

# The first frame of a message from the engine core.
OUTPUTS = b"\x00"
STARTUP = b"\x01"
DEAD = b"\x02"

# Time to end after it was told to, seconds.
_GRACE_S = 5.0
_STARTUP_POLL_MS = 200

# The search path comes first, so that everything that the arguments name is found.
_BOOTSTRAP = (
    "import pickle, sys; i = sys.stdin.buffer; "
    "n = int.from_bytes(i.read(8), 'little'); sys.path[:] = pickle.loads(i.read(n)); "
    "from vllm.v1.engine.core_proc import main; main()"
)


@dataclass(frozen=True)
class EngineCoreProcArgs:
    """All that the process is told, pickled, by its parent.

    Args:
        socket_directory: holds the sockets of both addresses, and nothing else.
        start_time: seconds of the monotonic clock, which the processes share.
    """

    vllm_config: VllmConfig
    executor_factory: ExecutorFactory | None
    log_stats: bool
    socket_directory: str
    start_time: float
    process_name: str = "EngineCore_DP0"

    @property
    def input_address(self) -> str:
        """Where the process listens."""
        return f"ipc://{self.socket_directory}/input"

    @property
    def output_address(self) -> str:
        """Where the parent listens."""
        return f"ipc://{self.socket_directory}/output"


class EngineCoreProcess:
    """A running engine core and the two sockets to it.

    When the process ends unasked, a message of kind DEAD arrives on `output_socket`,
    from the process itself if it could, so that a reader needs no second source.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_factory: ExecutorFactory | None,
        log_stats: bool,
    ) -> None:
        self._start_time = time.monotonic()
        self._context = zmq.Context()
        directory = tempfile.mkdtemp(prefix="vllm-")
        self._args = EngineCoreProcArgs(
            vllm_config,
            executor_factory,
            log_stats,
            socket_directory=directory,
            start_time=self._start_time,
        )
        self.input_socket = self._make_socket(zmq.PUSH)
        # The side that connects can send before the other is there, and never waits.
        self.input_socket.connect(self._args.input_address)
        self.output_socket = self._make_socket(zmq.PULL)
        self.output_socket.bind(self._args.output_address)
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP],
            stdin=subprocess.PIPE,
            # torch's threads must not spin after their work: this process, which is
            # busy while they are, needs the cores too. libgomp reads it once, at load.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
        )
        # Ends the process when this object is collected or the interpreter exits.
        self._finalizer = weakref.finalize(
            self, _end_process, self._popen, self._context, directory
        )
        self._is_shut_down = threading.Event()
        self.death_reason = ""
        self._send_args()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and was not told to end."""
        return self._popen.poll() is None and not self._is_shut_down.is_set()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._popen.pid

    def wait_until_ready(self) -> EngineCoreReady:
        """Wait for the end of start-up and log its times.

        Raises:
            CheckpointError, UnsupportedError, VLLMValidationError: as in the process.
            EngineDeadError: anything else; its reason is one line.
        """
        try:
            ready = self._receive_ready()
        except BaseException:
            self.shutdown()
            raise
        total_seconds = time.monotonic() - self._start_time
        logger.info("%s", format_phases(ready.phases, total_seconds))
        threading.Thread(
            target=_watch,
            args=(self._popen, self._context, self._args, weakref.ref(self)),
            name="engine-core-monitor",
            daemon=True,
        ).start()
        return ready

    def shutdown(self) -> None:
        """End the process: by a message, then by force."""
        if self._is_shut_down.is_set():
            return
        self._is_shut_down.set()
        if self._popen.poll() is None:
            self.input_socket.send_multipart([EngineCoreRequestType.SHUTDOWN.value])
            try:
                self._popen.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                logger.warning("The engine core does not end by itself; it is killed")
        self._finalizer()

    @property
    def is_shut_down(self) -> bool:
        """Whether `shutdown` was called."""
        return self._is_shut_down.is_set()

    def _make_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # Nothing is dropped: the other side reads all the time.
        socket.set_hwm(0)
        return socket

    def _send_args(self) -> None:
        assert self._popen.stdin is not None
        parts = pickle.dumps(sys.path), pickle.dumps(self._args)
        try:
            for part in parts:
                self._popen.stdin.write(len(part).to_bytes(8, "little") + part)
            # Left open: its end tells the process that its parent is gone.
            self._popen.stdin.flush()
        except BrokenPipeError:
            # The process has ended already; its exit status says more than this.
            logger.debug("The engine core ended before it read its arguments")

    def _receive_ready(self) -> EngineCoreReady:
        decoder = MsgpackDecoder(StartupReport)
        while True:
            has_ended = self._popen.poll() is not None
            if not self.output_socket.poll(0 if has_ended else _STARTUP_POLL_MS):
                if has_ended:
                    raise EngineDeadError(describe_exit(self._popen.returncode))
                continue
            _, *frames = self.output_socket.recv_multipart()
            report: StartupReport = decoder.decode(frames)
            if report.failure is not None:
                raise report.failure.to_exception()
            if report.ready is not None:
                return report.ready


def describe_exit(returncode: int) -> str:
    """Say what an exit status means, in one line."""
    if returncode == -signal.SIGKILL:
        return (
            "the engine core process was killed (SIGKILL), perhaps because the machine "
            "ran out of memory"
        )
    if returncode < 0:
        return (
            f"the engine core process was ended by {signal.Signals(-returncode).name}"
        )
    return f"the engine core process ended with exit status {returncode}"


def _watch(
    popen: "subprocess.Popen[bytes]",
    context: zmq.Context,
    args: EngineCoreProcArgs,
    process_ref: "weakref.ref[EngineCoreProcess]",
) -> None:
    """Wait for the process to end; if nobody asked for it, tell the reader."""
    reason = describe_exit(popen.wait())
    process = process_ref()
    if process is None or process.is_shut_down:
        return
    process.death_reason = reason
    socket = context.socket(zmq.PUSH)
    socket.connect(args.output_address)
    failure = StartupFailure("", reason)
    socket.send_multipart([DEAD, *MsgpackEncoder().encode(failure)])
    socket.close(linger=1000)


def _end_process(
    popen: "subprocess.Popen[bytes]", context: zmq.Context, directory: str
) -> None:
    """End the process if it still runs, and remove its sockets."""
    # The end of its input makes the process exit at once.
    if popen.stdin is not None:
        popen.stdin.close()
    try:
        popen.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    context.destroy(linger=0)
    shutil.rmtree(directory, ignore_errors=True)
