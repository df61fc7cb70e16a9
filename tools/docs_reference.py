"""Reference pages of the documentation site, from the code that they describe: `PAGES` by path."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import kvolt
from kvolt.cli import config
from kvolt.cli.flags import flag_name
from kvolt.cli.main import VERBS, verb_parser
from kvolt.core.errors import KvoltError
from kvolt.core.request import Sampling
from kvolt.engines.registry import find_engine
from kvolt.engines.remote.sglang_dialect import SglangDialect
from kvolt.engines.remote.vllm_dialect import VllmDialect
from kvolt.frontend.openai_api.errors import CANCELLED_STATUS, status_of
from kvolt.frontend.openapi.document import openapi
from kvolt.frontend.openapi.operations import ERRORS, ERRORS_OF_NO_OPERATION
from kvolt.runtime.config.leaves import leaves, sections
from kvolt.runtime.config.settings import TierSettings, WorkerSettings

# The command line


def cli_page() -> str:
    os.environ["COLUMNS"] = "100"
    lines = [
        "# Command line",
        "After this page you know every command and flag. It is the text of `kvolt VERB --help`; `kvolt --help` lists "
        "the verbs. Exit codes: 0 success, 1 failure, 2 invalid command line or configuration, 130 interrupted.",
        "Flags of settings are described in [Configuration](config.md), with all settings that have no flag.",
    ]
    for name, verb in VERBS.items():
        for words in ([name], *([name, sub] for sub, _ in verb.sub_modules)):
            _, parser, _ = verb_parser(words)
            lines += _help_of(parser, depth=2)
    return _joined(lines)


def _help_of(parser: argparse.ArgumentParser, depth: int) -> Iterator[str]:
    yield f"{'#' * depth} {parser.prog}"
    yield f"```text\n{parser.format_help().rstrip()}\n```"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub_parser in action.choices.values():
                yield from _help_of(sub_parser, depth + 1)


# Settings


def config_page() -> str:
    lines = [
        "---\nhide: [toc]\n---\n# Configuration",
        "After this page you can set every setting. Values come from defaults, then a TOML file (`kvolt.toml` or "
        "`--config`), then environment variables, then flags; `--set SECTION.KEY=VALUE` sets any setting. "
        "`kvolt config describe` prints this page, `kvolt config show` the values in effect with their origins, "
        "`kvolt config check FILE` the errors of a file. The flags `--arg` and `--kv-...` and the file's "
        "`[[workers]]` set those of `workers`.",
    ]
    structs = {**sections(), "workers": WorkerSettings, "workers.tiers": TierSettings}
    section = None
    for key, leaf in config.described_leaves().items():
        if leaf.section != section and leaf.section is not None:
            section = leaf.section
            lines += [f"## {section}", _text(inspect.cleandoc(structs[section].__doc__ or ""))]
        facts = [leaf.expects, f"default: {_code(config._default_text(leaf))}"]
        if key in leaves():
            facts.append(f"environment: `{leaf.env}`")
        if name := flag_name(key):
            facts.append(f"flag: `{name}`")
        lines += [f"### `{key}` {{#{key}}}", _text(leaf.description), f"*{'; '.join(facts)}*"]
    return _joined(lines)


# The HTTP API


def http_page() -> str:
    document = openapi()
    schemas = document["components"]["schemas"]
    lines = [
        "# HTTP API",
        "After this page you can write a client. A running frontend serves the same as OpenAPI at `/openapi.json`, and "
        "an interactive page at `/docs`. Its port is `frontend.port` (8000). There is no authentication.",
        _text(document["info"]["description"]),
    ]
    for tag in document["tags"]:
        lines.append(f"## {tag['name']}")
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if tag["name"] in operation["tags"]:
                    lines += _operation(f"{method.upper()} {path}", operation, schemas)
    lines += ["## Objects", "Fields without a default are required in requests."]
    for name, schema in schemas.items():
        lines += [f"### {name}", *_fields(schema)]
    lines += [
        "## Sampling fields by engine",
        "Workers refuse (501) a request that sets another field.",
        _engines(),
    ]
    lines += ["## Errors", "Bodies and codes: [errors and remedies](errors.md#http)."]
    return _joined(lines)


def _engines() -> str:
    """Sampling fields that each engine implements."""
    built_in = ("native", "sim", "vllm", "sglang", "trtllm")
    declared: dict[str, frozenset[str]] = {
        name: cast(Any, find_engine(name).build).sampling_fields for name in built_in
    }
    for dialect in (VllmDialect, SglangDialect):  # prompt log probabilities: in resumed requests only
        declared[f"remote ({dialect.kind.value})"] = dialect.sampling_fields - {"prompt_logprobs"}
    rows = [
        (
            f"`{'n' if name == 'num_choices' else name}`",
            *("yes" if name in each else "no" for each in declared.values()),
        )
        for name in Sampling.__struct_fields__
    ]
    return _table(("field", *declared), rows)


def _operation(route: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f"### {route}"
    yield _text(f"{operation['summary']}. {operation.get('description', '')}")
    if parameters := operation.get("parameters"):
        yield _table(
            ("parameter", "in", "meaning"),
            [(f"`{each['name']}`", each["in"], each["description"]) for each in parameters],
        )
    if body := operation.get("requestBody"):
        yield f"Request: {_type(body['content']['application/json']['schema'])}."
    for status, answer in operation["responses"].items():
        if "content" in answer:
            types = [
                _type(media["schema"]) for kind, media in answer["content"].items() if "event-st" not in kind
            ]
            yield f"{status}: {', '.join(types)}. {answer['description']}"
    errors = ", ".join(status for status, answer in operation["responses"].items() if "$ref" in answer)
    yield f"Errors: {errors}."


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    if text := schema.get("description"):
        yield _text(text)
    rows = [
        (f"`{name}`", _type(field), _default(field), field.get("description", ""))
        for name, field in schema.get("properties", {}).items()
    ]
    if rows:
        yield _table(("field", "type", "default", "meaning"), rows)
    elif "anyOf" in schema or "enum" in schema:
        yield f"{_type(schema)}."


def _default(field: dict[str, Any]) -> str:
    return (
        f"`{field['default']}`"
        if field.get("default") is not None
        else ""
        if "default" in field
        else "required"
    )


def _type(schema: dict[str, Any]) -> str:
    if ref := schema.get("$ref"):
        name = ref.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(each) for each in options if each.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items') or {})}"
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = f" {low} to {high}" if None not in (low, high) else ""
    return f"{'/'.join(kind) if isinstance(kind, list) else kind}{bounds}"


# Errors

_ACTIONS = {
    "caller": "Change the request; a retry fails again.",
    "operator": "Change the configuration as the message says.",
    "server": "Read the server's log.",
    "network": "Check that the peer runs and can be reached.",
    "none": "Nothing.",
}


def errors_page() -> str:
    lines = [
        "# Errors and remedies",
        "After this page you know what an error means and what to do about it. Error types are those of "
        "`kvolt.core.errors`; their codes appear in logs, metrics and responses.",
        "## HTTP",
        'The body of an error is `{"error": {"message", "type", "param", "code"}}`, as in OpenAI\'s API. Details that '
        "only operators can act on are in the server's log, under the `x-request-id` of the response.",
        _table(("status", "code", "meaning"), list(_http_rows())),
        "## Types",
        _table(("code", "status", "meaning", "what to do"), list(_type_rows(KvoltError))),
        "## Messages with a remedy",
        "Commands print the message with the remedy in parentheses and exit with 2. `{name}` stands for a value.",
    ]
    for package, rows in sorted(_remedies().items()):
        lines += [f"### {package}", _table(("message", "remedy"), rows)]
    return _joined(lines)


def _http_rows() -> Iterator[tuple[str, ...]]:
    rows = [(status, about, code) for status, (_, about, code) in ERRORS.items()]
    for status, about, code in sorted([*rows, *ERRORS_OF_NO_OPERATION]):
        yield str(status), f"`{code}`", about


def _type_rows(kind: type[KvoltError]) -> Iterator[tuple[str, ...]]:
    status = status_of(kind(""))
    if "code" in vars(kind):  # otherwise it is reported under its base's code
        yield (
            f"`{kind.code}`",
            "" if status == CANCELLED_STATUS or kind.fault == "operator" else str(status),
            " ".join((kind.__doc__ or "").split()),
            "Retry later; kvolt retries where it can." if kind.retryable else _ACTIONS[kind.fault],
        )
    for child in kind.__subclasses__():
        yield from _type_rows(child)


def _remedies() -> dict[str, list[tuple[str, ...]]]:
    """Message and remedy of every error that is raised with one, by package."""
    rows_by_package: dict[str, dict[tuple[str, ...], None]] = {}
    root = Path(kvolt.__file__).parent
    for path in sorted(root.rglob("*.py")):
        package = path.relative_to(root).parts[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and node.args and package != "testing":
                remedy = next((each.value for each in node.keywords if each.arg == "remedy"), None)
                row = (_template(node.args[0]), _template(remedy))
                if all(row):
                    rows_by_package.setdefault(package, {})[row] = None
    return {package: sorted(rows) for package, rows in rows_by_package.items()}


def _template(node: ast.expr | None) -> str:
    """Text of a string expression, with values as `{name}`; empty if it is none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_template(part) for part in parts)
        case ast.FormattedValue(value=value):
            name = re.findall(r"\w+", ast.unparse(value)) or ["value"]
            return f"{{{name[-1]}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _template(left) + (
                _template(right) if isinstance(right, ast.Constant | ast.JoinedStr) else ""
            )
    return ""


# Markdown


def _joined(blocks: list[str]) -> str:
    return "\n\n".join(filter(None, blocks)) + "\n"


def _text(text: str) -> str:
    """Plain text as Markdown: angle brackets are not HTML."""
    return text.replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{text}`" if text not in ("not set", "empty") else text


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in lines)


def _cell(text: str) -> str:
    return _text(" ".join(text.split())).replace("|", "\\|").replace("*", "\\*")


PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/cli.md": cli_page,
    "docs/reference/config.md": config_page,
    "docs/reference/http.md": http_page,
    "docs/reference/errors.md": errors_page,
}
