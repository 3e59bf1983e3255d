"""The program itself: help, exit codes, and ``python -m hf_paged``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_paged.cli.app import app, main

pytestmark = pytest.mark.core_suite

COMMANDS = sorted(
    command.name or command.callback.__name__
    for command in app.registered_commands
    if command.callback is not None
)


def test_plan_and_doctor_are_there() -> None:
    assert {"doctor", "plan"} <= set(COMMANDS)


def test_without_arguments_it_lists_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_is_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Usage:" in text and command in text
    assert "--help" in text


@pytest.mark.parametrize("arguments", [["no-such-command"], ["plan", "--no-such-option"]])
def test_a_usage_error_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert arguments[-1] in captured.err


def test_an_error_longer_than_a_terminal_stays_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console once broke it after 80 columns where stderr is no terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["plan", "--memory", "1GiB"]) == 2
    error = capsys.readouterr().err
    assert len(error) > 100
    assert error.count("\n") == 1


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_paged", "plan", "--memory", "-1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("hf-paged: --memory '-1'")
    assert done.stderr.count("\n") == 1
