"""The `/docs` page: the OpenAPI document as one self-contained HTML file.

Rendered on the server and readable without JavaScript; the script adds "try it" and the choice of light or dark. A
content security policy blocks external resources.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from typing import Any

Json = dict[str, Any]

_SCHEMAS = "#/components/schemas/"
_MAX_DEPTH = 6
_LIMITS = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " items"),
    ("minProperties", "maxProperties", " entries"),
)


def docs_page(document: Json) -> bytes:
    style, script = _asset("docs_page.css"), _asset("docs_page.js")
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    )
    sections = "".join(_section(document, *place) for place in _operations(document))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="content-security-policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<nav aria-label="Operations">
<header><a href="#top">{escape(info["title"])}</a><button id="theme" type="button">light / dark</button></header>
{_navigation(document)}
</nav>
<main id="top">
<h1>{escape(info["title"])} <small>{escape(info["version"])}</small></h1>
{_prose(info.get("description", ""))}
<p>Also available as <a href="/openapi.json">openapi.json</a>.</p>
{sections}
</main>
<script>{script}</script>
</body>
</html>
""".encode()


def _asset(name: str) -> str:
    return files("kvolt.frontend.openapi").joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    """Path, method and operation, in tag order."""
    for tag in document["tags"]:
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if operation["tags"] == [tag["name"]]:
                    yield path, method, operation


def _navigation(document: Json) -> str:
    parts: list[str] = []
    for tag in document["tags"]:
        links = [
            f'<li><a href="#{escape(operation["operationId"])}">{_method(method)}<span>{escape(path)}</span></a></li>'
            for path, method, operation in _operations(document)
            if operation["tags"] == [tag["name"]]
        ]
        parts.append(f"<h2>{escape(tag['name'])}</h2><ul>{''.join(links)}</ul>")
    return "\n".join(parts)


def _method(method: str) -> str:
    return f'<span class="method {escape(method)}">{escape(method)}</span>'


def _section(document: Json, path: str, method: str, operation: Json) -> str:
    parts = [
        f'<section id="{escape(operation["operationId"])}">',
        f"<h2>{escape(operation['summary'])}</h2>",
        f'<div class="route">{_method(method)}<span>{escape(path)}</span></div>',
        _prose(operation.get("description", "")),
    ]
    if parameters := operation.get("parameters"):
        parts.append(f"<h3>Parameters</h3>{_parameters(parameters)}")
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        parts.append(f"<h3>Body</h3>{_schema_details(document, body['schema'])}")
    parts.append(f"<h3>Answers</h3>{_answers(document, operation['responses'])}")
    parts.append(_try_it(path, method, operation, body))
    return "\n".join([*parts, "</section>\n"])


def _parameters(parameters: list[Json]) -> str:
    rows = [
        f"<tr><td><code>{escape(item['name'])}</code>{_required_mark(item.get('required', False))}</td>"
        f'<td><span class="type">{escape(item["in"])}, {_kind(item["schema"])}</span>'
        f"{_prose(item.get('description', ''))}</td></tr>"
        for item in parameters
    ]
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def _answers(document: Json, answers: Json) -> str:
    rows: list[str] = []
    for status, entry in answers.items():
        answer = entry
        if "$ref" in entry:
            answer = document["components"]["responses"][entry["$ref"].rpartition("/")[2]]
        details = "".join(_media(document, *item) for item in answer["content"].items())
        if "$ref" in entry:  # all errors have the same schema: show the example only
            details = _example(answer["content"]["application/json"])
        rows.append(
            f'<tr><td><span class="status s{status[0]}">{escape(status)}</span></td>'
            f"<td>{_prose(answer['description'])}{details}</td></tr>"
        )
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def _media(document: Json, media_type: str, media: Json) -> str:
    heading = f'<p class="type">{escape(media_type)}</p>'
    return heading + _example(media) + _schema_details(document, media["schema"])


def _example(media: Json) -> str:
    if "example" not in media:
        return ""
    return f"<details><summary>example</summary><pre>{escape(_pretty(media['example']))}</pre></details>"


def _try_it(path: str, method: str, operation: Json, body: Json | None) -> str:
    fields = [
        f"<label>{escape(item['name'])} "
        f'<input name="{escape(item["name"])}" value="{escape(item.get("example", ""))}"></label>'
        for item in operation.get("parameters", ())
        if item["in"] == "path"
    ]
    if body is not None:
        examples = {name: _pretty(example["value"]) for name, example in body["examples"].items()}
        options = [
            f'<option data-body="{escape(text)}">{escape(name)}</option>' for name, text in examples.items()
        ]
        first = next(iter(examples.values()), "{}")
        fields.append(f'<label>example <select name="example">{"".join(options)}</select></label>')
        fields.append(
            f'<textarea name="body" aria-label="request body" spellcheck="false">{escape(first)}</textarea>'
        )
    return f"""<details class="try"><summary>try it</summary>
<form data-method="{escape(method)}" data-path="{escape(path)}">{"".join(fields)}
<div class="bar"><button class="send" type="submit">send</button>
<button class="stop" type="button" disabled>stop</button>
<button class="curl" type="button">as curl</button><span class="outcome" role="status"></span></div>
<pre class="output" hidden></pre></form></details>"""


# schemas


def _schema_details(document: Json, schema: Json, depth: int = 0) -> str:
    """Folded tables of the objects in a schema."""
    parts: list[str] = []
    for name, target in _objects(document, schema):
        inner = _properties(document, target, depth) if depth < _MAX_DEPTH else ""
        if inner:
            opened = (
                " open" if depth == 0 and "properties" in target and len(target["properties"]) <= 8 else ""
            )
            parts.append(f"<details{opened}><summary>{escape(name)}</summary>{inner}</details>")
    return "".join(parts)


def _objects(document: Json, schema: Json) -> Iterator[tuple[str, Json]]:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_SCHEMAS)
        target = document["components"]["schemas"][name]
        if "properties" in target:
            yield name, target
        else:
            yield from _objects(document, target)
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key, ()):
            yield from _objects(document, option)
    for key in ("items", "additionalProperties", "contentSchema"):
        if isinstance(schema.get(key), dict):
            yield from _objects(document, schema[key])
    for inner in schema.get("properties", {}).values():  # of an object without a name
        yield from _objects(document, inner)


def _properties(document: Json, schema: Json, depth: int) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code>{_required_mark(name in required)}</td>"
        f'<td><span class="type">{_kind(item)}</span>{_prose(item.get("description", ""))}'
        f"{_schema_details(document, item, depth + 1)}</td></tr>"
        for name, item in sorted(schema["properties"].items(), key=lambda field: field[0] not in required)
    ]
    return f"{_prose(schema.get('description', ''))}<table><tbody>{''.join(rows)}</tbody></table>"


def _required_mark(required: bool) -> str:
    return ' <span class="must">required</span>' if required else ""


def _kind(schema: Json) -> str:
    """Short description of a type: `integer, 1 to 128`, `list of string`, `number or null`."""
    if "$ref" in schema:
        return escape(schema["$ref"].removeprefix(_SCHEMAS))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_kind(option) for option in schema[key]))
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array":
        inner = _kind(schema["items"]) if isinstance(schema.get("items"), dict) else "anything"
        kind = f"list of ({inner})" if " or " in inner else f"list of {inner}"
    limits = [_range(schema, low, high, unit) for low, high, unit in _LIMITS]
    over = [f"over {schema['exclusiveMinimum']}"] if "exclusiveMinimum" in schema else []
    return ", ".join([kind, *over, *filter(None, limits)])


def _range(schema: Json, low: str, high: str, unit: str) -> str:
    if low in schema and high in schema:
        return f"{schema[low]} to {schema[high]}{unit}"
    if low in schema:
        return "not empty" if unit and schema[low] == 1 else f"at least {schema[low]}{unit}"
    return f"at most {schema[high]}{unit}" if high in schema else ""


# text


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


_CODE = re.compile(r"`([^`]+)`")


def _prose(text: str) -> str:
    """Render paragraphs, dash lists and backtick code as HTML; all other text is escaped."""
    parts: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()) if text.strip() else ():
        lines = block.splitlines()
        plain = [line for line in lines if not line.lstrip().startswith("- ")]
        items = [line.lstrip()[2:] for line in lines if line.lstrip().startswith("- ")]
        if plain:
            parts.append(f"<p>{_inline(' '.join(map(str.strip, plain)))}</p>")
        if items:
            parts.append(f"<ul>{''.join(f'<li>{_inline(item)}</li>' for item in items)}</ul>")
    return "".join(parts)


def _inline(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text))
