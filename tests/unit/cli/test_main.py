"""The command as a whole: verbs, exit codes, one-line errors, and how little `--help` imports."""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from kvolt.cli.flags import GROUPS, recorded_overrides
from kvolt.cli.main import VERBS, Verb, main, verb_parser
from kvolt.cli.serve.command import HELP as serve_help
from kvolt.core.errors import ConfigError, Unavailable
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.version import __version__

Run = Callable[[argparse.Namespace, LoadedConfig], int]


@pytest.fixture(autouse=True)
def _clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def install(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """A verb named `probe` whose work is `run`."""
    module = types.ModuleType("kvolt_probe_verb")
    module.__dict__.update(HELP="Probes.", configure=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "kvolt_probe_verb", module)
    monkeypatch.setitem(
        VERBS, "probe", Verb("kvolt_probe_verb", "probes", "inspect", ("HTTP API", "logging"))
    )


def failing(error: BaseException) -> Run:
    def run(_args: argparse.Namespace, _loaded: LoadedConfig) -> int:
        raise error

    return run


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in VERBS)
    assert main([]) == 0
    assert main(["help"]) == 0
    assert capsys.readouterr().out == text * 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvolt {__version__}\n"


def test_readme_changelog_and_package_have_the_version_of_the_command() -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    source = root / project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{__version__}"' in source.read_text()
    assert f"**Status ({__version__}).**" in " ".join((root / "README.md").read_text().split())
    assert f"\nversion: {__version__}\n" in (root / "CITATION.cff").read_text()
    newest = (root / "CHANGELOG.md").read_text().partition("\n## ")[2].split()[0]
    assert newest == __version__


def test_badges_are_true() -> None:
    badges = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "badges.py"))
    written = {path.name: path.read_text() for path in badges["FOLDER"].iterdir()}
    assert written == badges["badges"](), "run python tools/badges.py"


def test_make_starts_what_kvolt_serve_starts() -> None:
    root = Path(__file__).parents[3]
    makefile = (root / "Makefile").read_text()
    assert re.findall(r"^\t@\$\(BIN\)/kvolt (.*)$", makefile, re.MULTILINE) == ["serve $(ARGS)"]
    assert "`make serve` is `kvolt serve`" in " ".join((root / "README.md").read_text().split())
    assert "By default one worker computes prompts and answers." in " ".join(serve_help.split())


def test_readme_names_only_existing_verbs() -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text()
    named = set(re.findall(r"(?:\$ |`|bin/)kvolt ([a-z]+)\b", text))
    assert named <= set(VERBS)


def test_verbs_name_existing_groups_of_settings() -> None:
    for verb in VERBS.values():
        assert set(verb.settings) <= set(GROUPS)


def test_a_verb_gets_config_with_origins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[LoadedConfig] = []

    def run(_args: argparse.Namespace, loaded: LoadedConfig) -> int:
        seen.append(loaded)
        return 7

    install(monkeypatch, run)
    monkeypatch.setenv("KVOLT_LOG_LEVEL", "error")
    (tmp_path / "mine.toml").write_text("namespace = 'n'\n")
    assert main(["probe", "--port", "1", "--config", "mine.toml"]) == 7
    origins = seen[0].origins
    assert origins["frontend.port"] == "flag --port"
    assert origins["log.level"] == "env KVOLT_LOG_LEVEL"
    assert origins["namespace"] == "file mine.toml"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            ConfigError("port taken", key="port", remedy="choose another"),
            2,
            "kvolt: port taken (choose another)\n",
        ),
        (Unavailable("nobody there", endpoint="e"), 1, "kvolt: nobody there\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    install(monkeypatch, failing(error))
    assert main(["probe"]) == code
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["serv"], "kvolt: unknown verb serv; did you mean serve? (see `kvolt --help`)\n"),
        (["zzzz"], "kvolt: unknown verb zzzz (see `kvolt --help`)\n"),
        (
            ["stop"],
            "kvolt: no verb stop (press Ctrl-C where `kvolt serve` runs, or, if all run on this machine, "
            "stop every `kvolt serve`: "
            r"""`kvolt status --json | grep -oP 'supervisor_pid": \K\d+' | sort -u | xargs -r kill`)"""
            "\n",
        ),
        (
            ["stop", "all", "--namespace", "a", "--join=b:1"],
            "kvolt: no verb stop (press Ctrl-C where `kvolt serve` runs, or, if all run on this machine, "
            "stop every `kvolt serve`: "
            r"""`kvolt status --json --namespace a --join=b:1 | grep -oP 'supervisor_pid": \K\d+' """
            "| sort -u | xargs -r kill`)\n",
        ),
        (
            ["logs"],
            "kvolt: no verb logs (`kvolt serve` shows them, and writes them to supervisor.log_dir "
            "(`kvolt config show`))\n",
        ),
        (["ps"], "kvolt: no verb ps (`kvolt status` shows what is running)\n"),
        (["pull", "m"], "kvolt: no verb pull (`kvolt model fetch NAME` downloads a model)\n"),
        (["--port", "1"], "kvolt: flag --port before the verb (write `kvolt VERB FLAGS`)\n"),
        (
            ["config", "shw"],
            "kvolt: config: unknown choice shw; did you mean show? (see `kvolt config --help`)\n",
        ),
        (
            ["config", "show", "--tmol"],
            "kvolt: config show: unknown flag --tmol; did you mean --toml? "
            "(see `kvolt config show --help`)\n",
        ),
    ],
)
def test_wrong_commands_exit_with_two(capsys: pytest.CaptureFixture[str], argv: list[str], line: str) -> None:
    assert main(argv) == 2
    assert capsys.readouterr() == ("", line)


def test_help_of_a_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, failing(AssertionError("help must not run the verb")))
    assert main(["help", "probe"]) == 0
    assert "Probes." in capsys.readouterr().out


def test_help_of_serve_fits_two_screens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["serve", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 105
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("argv", [["doctor"], ["config", "show"]])
def test_flags_of_serve_are_listed_by_serve_only(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Flags of settings, as in `kvolt serve --help`, work too." in text
    assert "--tool-parser" not in text
    verb, *rest = argv
    _, parser, _ = verb_parser([verb])
    assert recorded_overrides(parser.parse_args([*rest, "--tool-parser", "hermes"]))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvolt.cli.main import main; main(['--help']);"
        "heavy = {'uvloop', 'zmq', 'tokenizers', 'numpy', 'asyncio', 'rich', 'torch'} & set(sys.modules);"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("verb", "unneeded"),
    [
        ("status", ("numpy", "jinja2", "kvolt.router.policy", "kvolt.transfer")),
        ("chat", ("numpy", "jinja2", "kvolt.router", "kvolt.transfer")),
        (
            "serve",
            (
                "jinja2",
                "tokenizers",
                "kvolt.router",
                "kvolt.journey",
                "kvolt.worker.worker",
                "kvolt.transfer.agent",
            ),
        ),
        ("worker", ("jinja2", "tokenizers", "kvolt.frontend", "kvolt.router.policy")),
    ],
)
def test_a_verb_imports_what_it_needs(verb: str, unneeded: tuple[str, ...]) -> None:
    code = (
        f"import sys; from kvolt.cli.main import main; main(['{verb}', '--help']);"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    imported = done.stderr.split()
    assert f"kvolt.cli.{verb}" in imported
    assert [name for name in imported if f"{name}.".startswith(tuple(f"{each}." for each in unneeded))] == []


def test_a_reader_that_leaves_is_no_error() -> None:
    # The sleep holds the first write back until the reader's end of the pipe is closed.
    code = "import sys, time; time.sleep(0.3); from kvolt.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "config", "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        complaint = child.stderr.read()
    assert (child.returncode, complaint) == (141, b"")
