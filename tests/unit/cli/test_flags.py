"""Every setting has its flag, and a flag says nothing that the user did not type."""

from __future__ import annotations

import pytest

from kvolt.cli.flags import Parser, add_settings, flag_name, given_overrides
from kvolt.core.errors import ConfigError
from kvolt.runtime.config.loader import Override
from kvolt.runtime.config.settings import leaves, sections


def parser_for(home: str | None = None, used: tuple[str, ...] | None = None) -> Parser:
    parser = Parser(prog="kvolt serve")
    add_settings(parser, home, tuple(sections()) if used is None else used)
    return parser


@pytest.mark.parametrize("key", list(leaves()))
@pytest.mark.parametrize("home", [None, "frontend"])
def test_every_leaf_has_a_flag(key: str, home: str | None) -> None:
    leaf = leaves()[key]
    flag = flag_name(leaf, home)
    argv = [flag] if isinstance(leaf.default, bool) else [flag, "some text"]
    text = "true" if isinstance(leaf.default, bool) else "some text"
    assert given_overrides(parser_for(home).parse_args(argv)) == [Override(key, text, flag)]


def test_names_in_and_out_of_the_home_section() -> None:
    assert flag_name(leaves()["frontend.max_body_bytes"], "frontend") == "--max-body-bytes"
    assert flag_name(leaves()["frontend.max_body_bytes"], None) == "--frontend-max-body-bytes"
    assert flag_name(leaves()["namespace"], None) == "--namespace"


def test_no_default_leaks() -> None:
    args = parser_for("frontend").parse_args([])
    assert given_overrides(args) == []
    assert vars(args) == {}


def test_the_last_flag_wins_and_aliases_keep_their_name() -> None:
    argv = ["--port", "1", "--port=2", "--join", "h:1", "--no-admin-enabled", "--config", "f.toml"]
    args = parser_for("frontend").parse_args(argv)
    assert given_overrides(args) == [
        Override("frontend.port", "2", "--port"),
        Override("discovery.join", "h:1", "--join"),
        Override("admin.enabled", "false", "--no-admin-enabled"),
    ]
    assert args.config == "f.toml"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "serve: unknown flag --prot; did you mean --port?"),
        (["--prot=1"], "serve: unknown flag --prot; did you mean --port?"),
        (["--log-lev", "info"], "serve: unknown flag --log-lev; did you mean --log-level?"),
        (["--zzzzzzzz"], "serve: unknown flag --zzzzzzzz"),
        (["stray"], "serve: unexpected argument stray"),
        (["--port"], "serve: argument --port: expected one argument"),
    ],
)
def test_a_wrong_command_line_is_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parser_for("frontend").parse_args(argv)
    assert caught.value.message == message
    assert caught.value.fields["remedy"] == "see `kvolt serve --help`"


def test_sections_that_a_verb_does_not_use_are_no_flags() -> None:
    with pytest.raises(ConfigError, match="unknown flag --supervisor-log-dir"):
        parser_for(None, ("log",)).parse_args(["--supervisor-log-dir", "x"])


def test_help_shows_description_default_and_environment_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = parser_for("frontend").format_help()
    assert "Port of the HTTP API; 0 takes any free one. (default: 8000; env KVOLT_FRONTEND_PORT)" in text
    assert "usage: kvolt serve [-h] [--config FILE] [SETTINGS]\n" in text
    unwrapped = " ".join(text.split())
    for leaf in leaves().values():
        assert f"env {leaf.env})" in unwrapped
