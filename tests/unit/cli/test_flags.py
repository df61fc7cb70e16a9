"""Flags for common settings, `--set` for all of them; only what was typed is recorded."""

from __future__ import annotations

import pytest

from kvolt.cli.flags import GROUPS, Parser, add_settings, flag_name, recorded_overrides
from kvolt.cli.main import verb_parser
from kvolt.core.errors import ConfigError
from kvolt.runtime.config.leaves import leaves
from kvolt.runtime.config.loader import Override

KEYS = [key for keys in GROUPS.values() for key in keys]


def parser_for(*groups: str) -> Parser:
    parser = Parser(prog="kvolt serve")
    add_settings(parser, groups or tuple(GROUPS))
    return parser


@pytest.mark.parametrize("key", KEYS)
def test_a_flag_records_its_setting(key: str) -> None:
    flag = flag_name(key)
    assert flag is not None
    is_switch = any(keys.get(key) == "" for keys in GROUPS.values())
    argv, text = ([flag], "true") if is_switch else ([flag, "some text"], "some text")
    assert recorded_overrides(parser_for().parse_args(argv)) == [Override(key, text, flag)]


@pytest.mark.parametrize("key", list(leaves()))
def test_every_setting_can_be_set(key: str) -> None:
    args = parser_for().parse_args(["--set", f"{key}=a=b"])
    assert recorded_overrides(args) == [Override(key, "a=b", f"--set {key}")]


def test_flag_names() -> None:
    assert flag_name("frontend.port") == "--port"
    assert flag_name("log.level") == "--log-level"
    assert flag_name("namespace") == "--namespace"
    assert flag_name("discovery.join") == "--join"
    assert flag_name("router.temperature") is None


def test_no_default_is_recorded() -> None:
    args = parser_for().parse_args([])
    assert recorded_overrides(args) == []
    assert vars(args) == {}


def test_the_last_flag_of_a_setting_wins() -> None:
    argv = ["--port", "1", "--set", "frontend.port=2", "--join", "h:1", "--config", "f.toml"]
    args = parser_for().parse_args(argv)
    assert recorded_overrides(args) == [
        Override("frontend.port", "2", "--set frontend.port"),
        Override("discovery.join", "h:1", "--join"),
    ]
    assert args.config == "f.toml"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "serve: unknown flag --prot; did you mean --port?"),
        (["--prot=1"], "serve: unknown flag --prot; did you mean --port?"),
        (["--log-lev", "info"], "serve: unknown flag --log-lev; did you mean --log-level?"),
        (["--router-queue"], "serve: unknown flag --router-queue; use --set router.queue=VALUE"),
        (["--no-router-queue"], "serve: unknown flag --no-router-queue; use --set router.queue=false"),
        (["--zzzzzzzz"], "serve: unknown flag --zzzzzzzz"),
        (["stray"], "serve: unexpected argument stray"),
        (["--port"], "serve: argument --port: expected one argument"),
    ],
)
def test_a_wrong_command_line_is_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parser_for().parse_args(argv)
    assert caught.value.message == message
    assert caught.value.fields["remedy"] == "see `kvolt serve --help`"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("router.temprature=1", "--set: unknown setting router.temprature; did you mean router.temperature?"),
        ("kv.host=1GiB", "--set: unknown setting kv.host"),
        ("temperature=1", "--set: unknown setting temperature; did you mean router.temperature?"),
        (
            "port=1",
            "--set: unknown setting port; did you mean runtime.port or admin.port or frontend.port?",
        ),
        ("zzzzzzzz=1", "--set: unknown setting zzzzzzzz"),
        ("router.queue", "--set router.queue has no value"),
        ("workers.count=3", "--set cannot change workers.count"),
    ],
)
def test_a_wrong_assignment_suggests_similar_settings(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parser_for().parse_args(["--set", text])
    assert caught.value.message == message


def test_flags_of_vllm_name_the_argument_to_use() -> None:
    _, parser, _ = verb_parser(["serve"])
    with pytest.raises(ConfigError) as caught:
        parser.parse_args(["--max-model-len", "8"])
    assert caught.value.message == (
        "serve: unknown flag --max-model-len; use --arg context_length=VALUE (native engine), or "
        "--engine vllm --arg engine_args.max_model_len=VALUE"
    )


def test_settings_of_other_names_tell_what_to_use() -> None:
    for text, remedy in (("kv.host=1GiB", "--kv-host SIZE"), ("router.policy=random", "--router POLICY")):
        with pytest.raises(ConfigError) as caught:
            parser_for().parse_args(["--set", text])
        assert remedy in str(caught.value.fields["remedy"])


def test_a_verb_has_only_the_flags_of_its_groups() -> None:
    with pytest.raises(ConfigError, match="unknown flag --port"):
        parser_for("logging").parse_args(["--port", "1"])


def test_help_shows_description_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = parser_for().format_help()
    assert "Port of the HTTP API; 0: a free one. [default: 8000]" in text
    assert "lowest predicted latency" not in text, "flags show one sentence; `kvolt config describe` has all"
    assert text.startswith("usage: kvolt serve [OPTIONS]\n")
    assert max(map(len, text.splitlines())) <= 100
