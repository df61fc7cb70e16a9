"""Completion scripts, run in the shells that this machine has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvolt.cli.completion import _NAMES, SCRIPTS, list_commands
from kvolt.cli.main import VERBS, main


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `kvolt.SHELL` for each shell."""
    folder = tmp_path_factory.mktemp("scripts")
    commands = list_commands()
    for shell, write in SCRIPTS.items():
        (folder / f"kvolt.{shell}").write_text("\n".join(write(commands)) + "\n")
    return folder


_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
compopt() { :; }
_kvolt
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered_by_bash(scripts: Path, *words: str) -> list[str]:
    """Completions of the last word."""
    command = ["bash", "--norc", "-c", _BASH, "bash", str(scripts / "kvolt.bash"), "kvolt", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ser"], ["serve"]),
        (["serve", "--tl"], ["--tls-cert", "--tls-key"]),
        (["serve", "--engine", "s"], ["sim", "sglang"]),
        (["serve", "--engine", "=", "s"], ["sim", "sglang"]),
        (["serve", "m", "--prefill", "1", "--de"], ["--decode"]),
        (["serve", "--set", "router.queue_w"], ["router.queue_wait_s="]),
        (["serve", "--log-level", "w"], ["warning"]),
        (["serve", "--router", "r"], ["round-robin", "random"]),
        (["serve", "--tool-parser", "l"], ["llama3_json"]),
        (["frontend", "--reasoning-parser", "q"], ["qwen3"]),
        (["twin", "--preset", "h200-llama-8"], ["h200-llama-8b"]),
        (["twin", "--router", "c"], ["classic"]),
        (["twin", "sweep", "--kv-eviction", "s"], ["s3fifo"]),
        (["twin", "sweep", "--objective", "gpu_"], ["gpu_seconds"]),
        (["serve", "--config", "x"], []),
        (["cache", "st"], ["stat"]),
        (["cache", "stat", "--j"], ["--json"]),
        (["router", "ex"], ["explain"]),
        (["router", "explain", "--tok"], ["--tokens"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes_verbs_flags_and_values(scripts: Path, words: list[str], offered: list[str]) -> None:
    assert sorted(offered_by_bash(scripts, *words)) == sorted(offered)


_ZSH = """
setopt no_unset
matches() {  # of the arguments after --, without descriptions
    local -a found
    found=(${(M)${@%%:*}:#${words[CURRENT]#*=}*})
    (( $#found )) && print -l -- $found
}
compdef() { :; }
compset() { :; }
compadd() { matches ${@[$(( ${@[(i)--]} + 1 )),-1]}; }
_describe() { matches ${(P)2}; }
_files() { print -- FILES; }
source "$1"; shift
words=("$@") CURRENT=$#
_kvolt
"""
"""Runs the completion function with stand-ins for the functions of zsh that show what it offers."""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ser"], ["serve"]),
        (["serve", "--tl"], ["--tls-cert", "--tls-key"]),
        (["serve", "--engine", "s"], ["sim", "sglang"]),
        (["serve", "--engine=s"], ["sim", "sglang"]),
        (["serve", "m", "--decode", "1", "--pre"], ["--prefill", "--prefill-choice"]),
        (["serve", "--set", "router.queue_w"], ["router.queue_wait_s="]),
        (["serve", "--config", "x"], ["FILES"]),
        (["serve", "x"], ["FILES"]),
        (["cache", "stat", "--j"], ["--json"]),
        (["router", "explain", "--tok"], ["--tokens"]),
        (["completion", "z"], ["zsh"]),
        (["--v"], ["--version"]),
    ],
)
def test_zsh_completes_verbs_flags_and_values(scripts: Path, words: list[str], offered: list[str]) -> None:
    command = ["zsh", "-f", "-c", _ZSH, "zsh", str(scripts / "kvolt.zsh"), "kvolt", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == sorted(offered)


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvolt ser", ["serve"]),
        ("kvolt serve --engine s", ["sim", "sglang"]),
        ("kvolt cache stat --j", ["--json"]),
        ("kvolt router explain --tok", ["--tokens"]),
        ("kvolt serve m --decode 1 --pre", ["--prefill", "--prefill-choice"]),
        ("kvolt serve --engine=si", ["--engine=sim"]),
        ("kvolt serve --set router.queue_w", ["router.queue_wait_s="]),
        ("kvolt completion z", ["zsh"]),
        ("kvolt serve --config pl", ["plain.toml"]),
        ("kvolt serve pl", ["plain.toml"]),
        ("kvolt twin pl", ["plain.toml"]),
        ("kvolt completion pl", []),
    ],
)
def test_fish_completes_verbs_flags_and_values(scripts: Path, line: str, offered: list[str]) -> None:
    (scripts / "plain.toml").touch()
    code = f"source kvolt.fish; complete -C '{line}'"
    command = ["fish", "--no-config", "-c", code]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert sorted(each.split("\t")[0] for each in done.stdout.splitlines()) == sorted(offered)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_scripts_have_valid_syntax(scripts: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    done = subprocess.run([shell, "-n", scripts / f"kvolt.{shell}"], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_every_verb_is_completed() -> None:
    commands = list_commands()
    assert set(commands[""].verbs) == set(VERBS)
    assert all(commands[name].flags or commands[name].verbs for name in VERBS)


def test_no_word_is_expanded_by_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of plugins could be commands."""
    names = ["mine", "$(touch x)", "`id`", "(id)", "a b", "*", "x;y"]
    monkeypatch.setitem(_NAMES, "--engine", lambda: names)
    commands = list_commands()
    assert commands["serve"].values["--engine"] == ("mine",)
    for command in commands.values():
        words = [*command.verbs, *command.flags, *(each for some in command.values.values() for each in some)]
        assert all(re.fullmatch(r"[\w.=-]+", word, re.ASCII) for word in words)


def test_a_script_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.endswith("complete -o default -F _kvolt kvolt\n")
    assert main(["completion", "tcsh"]) == 2
