import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.v1.engine.fakes import (
    BrokenExecutor,
    DamagedExecutor,
    KilledExecutor,
    make_config,
)
from vllm.exceptions import (
    CheckpointError,
    EngineDeadError,
    UnsupportedError,
    VLLMValidationError,
)
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.core_process import describe_exit
from vllm.v1.engine.startup import (
    StartupClock,
    StartupFailure,
    StartupPhase,
    format_phases,
)

PARENT = """
import pathlib, sys, time
from tests.v1.engine.fakes import ParrotExecutor, make_config
from vllm.v1.engine.core_client import AsyncMPClient
config = make_config(pathlib.Path(sys.argv[1]))
client = AsyncMPClient(config, ParrotExecutor, log_stats=False)
print(client.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def parent(tokenizer_path, tmp_path):
    """Start a process that starts an engine; give both process ids."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tokenizer_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def start(tokenizer_path, executor_factory):
    AsyncMPClient(make_config(tokenizer_path), executor_factory, log_stats=False)


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def wait_until_gone(pid, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not is_gone(pid):
        assert time.monotonic() < deadline, "the process does not end"
        time.sleep(0.05)


def test_the_engine_ends_with_a_killed_parent_and_leaves_no_files(parent, tmp_path):
    process, engine_pid = parent
    assert list(tmp_path.glob("vllm-*"))
    process.kill()
    wait_until_gone(engine_pid)
    assert not list(tmp_path.glob("vllm-*"))


def test_sigterm_ends_the_engine_cleanly(parent):
    _, engine_pid = parent
    os.kill(engine_pid, signal.SIGTERM)
    wait_until_gone(engine_pid)


def test_an_interrupt_is_the_parents_affair(parent):
    _, engine_pid = parent
    os.kill(engine_pid, signal.SIGINT)
    time.sleep(0.3)
    assert not is_gone(engine_pid)


@pytest.mark.parametrize(
    ("returncode", "words"),
    [(-9, "ran out of memory"), (-11, "SIGSEGV"), (3, "exit status 3")],
)
def test_an_exit_status_is_told_in_words(returncode, words):
    assert words in describe_exit(returncode)


@pytest.mark.parametrize("kind", [CheckpointError, VLLMValidationError])
def test_a_users_error_crosses_the_border_as_it_is(kind):
    error = StartupFailure.from_exception(kind("two\n  lines")).to_exception()
    assert type(error) is kind
    assert str(error) == "two lines"


def test_another_error_names_its_kind():
    error = StartupFailure.from_exception(KeyError("x")).to_exception()
    assert isinstance(error, EngineDeadError)
    assert error.reason == "KeyError: 'x'"


def fail_to_allocate(num_bytes=2**62):
    torch.empty(num_bytes, dtype=torch.uint8)


def run_out():
    raise MemoryError("no room")


@pytest.mark.parametrize("allocate", [fail_to_allocate, run_out])
def test_too_little_memory_is_told_with_what_to_lower(allocate):
    with (
        pytest.raises(UnsupportedError, match=r"weights .*; use .* --max-model-len"),
        StartupClock().measure("weights"),
    ):
        allocate()


def test_another_error_of_a_phase_stays_what_it_is():
    with pytest.raises(RuntimeError, match="odd"), StartupClock().measure("weights"):
        raise RuntimeError("odd")


def test_what_no_phase_covers_is_shown():
    table = format_phases([StartupPhase("weights", 1.5)], 2.0)
    assert table.splitlines() == [
        "Start-up times:",
        "  weights    1.50 s",
        "  other      0.50 s",
        "  total      2.00 s",
    ]


def test_a_damaged_checkpoint_is_told_in_one_line_of_the_same_kind(tokenizer_path):
    with pytest.raises(CheckpointError) as caught:
        start(tokenizer_path, DamagedExecutor)
    message = "model.safetensors: is cut off; download it again"
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (BrokenExecutor, "ZeroDivisionError: division by zero"),
        (KilledExecutor, "exit status 7"),
    ],
)
def test_a_failed_start_says_why(tokenizer_path, factory, reason):
    with pytest.raises(EngineDeadError, match=reason):
        start(tokenizer_path, factory)
