"""A drafter that cannot draft for the model costs no start."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import free_port
from tests.engine.test_arg_utils import write_drafter


def serve(*flags: str) -> tuple[int, str]:
    """Return the exit code of a server that does not start, and its error."""
    command = [sys.executable, "-m", "vllm", "serve", "--port", str(free_port())]
    run = subprocess.run([*command, *flags], capture_output=True, text=True)
    return run.returncode, run.stderr


@pytest.mark.parametrize(
    ("keys", "reasons"),
    [
        ({"model": "{folder}/none"}, ["/none", "no such file"]),
        ({"model": "{folder}/other"}, ["/other", "vocabulary", " 100", " 49152"]),
        ({"method": "dflash"}, ["must name the drafter"]),
        (
            {"method": "draft_model", "model": "{folder}/empty"},
            ["/empty", "config.json"],
        ),
    ],
)
def test_the_reason_is_one_line_and_exit_code_2(
    tmp_path: Path, keys: dict[str, str], reasons: list[str]
):
    write_drafter(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    flags = [
        f"--speculative-config.{key}={value.format(folder=tmp_path)}"
        for key, value in (keys | {"num_speculative_tokens": "2"}).items()
    ]
    code, error = serve(*flags)
    assert code == 2
    lines = error.splitlines()
    assert "error: " in lines[-1]
    # Nothing but that line, and no word of an engine.
    assert len(lines) == 1
    for reason in ("speculative_config.model", *reasons):
        assert reason in lines[0]


def test_both_sides_are_named(tmp_path: Path, embedded_model: str):
    drafter = write_drafter(tmp_path / "other")
    _, error = serve(f"--speculative-config.model={drafter}")
    assert f"{drafter} for the model {embedded_model}: " in error
