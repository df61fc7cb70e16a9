"""What `test_bad_input` throws at a frontend: bytes that are no HTTP, bodies that are no request, texts that
are hard to tokenize. Large ones are made when they are asked for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.integration.processes import MODEL

MB = 1_000_000
CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"

Made = Callable[[], Any]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello", "max_tokens": 4, **more}


def request(path: str, body: Any, *lines: str) -> tuple[bytes, bytes]:
    """Head and body, as a client sends them."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *lines]
    return "\r\n".join([*head, f"content-length: {len(content)}", "", ""]).encode("latin-1"), content


# --- HTTP

OK = json.dumps(completion()).encode()
LENGTH = b"%d\r\n\r\n" % len(OK)
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
FORM = POST.replace(b"application/json", b"application/x-www-form-urlencoded")
GET = b"GET /live HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
END = b" HTTP/1.1\r\nhost: x\r\n\r\n"
JUNK = random.Random(5).randbytes(4000)

REFUSED: dict[tuple[int, str], dict[str, bytes]] = {
    (400, "malformed_request"): {
        "a negative length": POST + b"content-length: -1\r\n\r\n" + OK,
        "two lengths": POST + b"content-length: 5\r\ncontent-length: " + LENGTH + OK,
        "a length and chunks": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "a signed length": POST + b"content-length: +5\r\n\r\nhello",
        "a length in hex": POST + b"content-length: 0x5\r\n\r\nhello",
        "no length at all": POST + b"content-length: \r\n\r\n",
        "a length over 64 bits": POST + b"content-length: 99999999999999999999\r\n\r\n",
        "chunked twice": POST + b"transfer-encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n",
        "chunked last but one": POST + b"transfer-encoding: chunked, x\r\n\r\n0\r\n\r\n",
        "a chunk of no size": CHUNKED + b"zz\r\nhello\r\n",
        "a chunk of negative size": CHUNKED + b"-5\r\nhello\r\n",
        "a chunk over 64 bits": CHUNKED + b"f" * 17 + b"\r\nhello",
        "a chunk longer than said": CHUNKED + b"5\r\nhello, you\r\n",
        "chunks ended by LF": CHUNKED + b"%x\n%b\n0\n\n" % (len(OK), OK),
        "chunks of a byte": CHUNKED + b"1\r\n \r\n" * 40_000,
        "NUL in a value": GET + b"x: a\0b\r\n\r\n",
        "NUL in a name": GET + b"x\0y: a\r\n\r\n",
        "CR in a value": GET + b"x: a\rcontent-length: 5\r\n\r\n",
        "LF in a value": GET + b"x: a\ncontent-length: 5\r\n\r\n",
        "lines ended by LF": b"GET /live HTTP/1.1\nhost: x\n\n",
        "a folded header": GET + b"x: a\r\n b\r\n\r\n",
        "a space before the colon": POST + b"content-length : 5\r\n\r\nhello",
        "no colon": GET + b"transfer-encoding\r\n\r\n",
        "two hosts": GET + b"host: y\r\n\r\n",
        "bytes in the target": b"GET /v1/models/\xff" + END,
        "a target that is none": b"GET live" + END,
        "an unknown method": b"BREW /live" + END,
        "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
        "HTTP/9.9": b"GET /live HTTP/9.9\r\n\r\n",
        "a hello of TLS": bytes.fromhex("16030100c8010000c40303") + JUNK[:180],
        "noise": JUNK,
    },
    (413, "payload_too_large"): {
        "a length of 64 bits": POST + b"content-length: 18446744073709551615\r\n\r\n",
        "a length of 100 MB": POST + b"content-length: 104857600\r\n\r\n{",
        "the same with zeros before": POST + b"content-length: " + b"0" * 5000 + b"104857600\r\n\r\n{",
        "100 MB, if we may": POST + b"expect: 100-continue\r\ncontent-length: 104857600\r\n\r\n",
    },
    (431, "headers_too_large"): {
        "a long header": GET + b"x: " + b"y" * 40_000 + b"\r\n\r\n",
        "a long target": b"GET /" + b"x" * 40_000 + END,
        "10,000 headers": GET + b"".join(b"x%d: y\r\n" % number for number in range(10_000)) + b"\r\n",
        "one header 10,000 times": GET + b"x:\r\n" * 10_000 + b"\r\n",
        "endless blank lines": b"\r\n" * 40_000,
        "an endless chunk extension": CHUNKED + b"5;" + b"x" * 80_000,
        "an endless trailer": CHUNKED + b"0\r\nx: " + b"y" * 80_000,
    },
    (501, "unsupported"): {
        "zipped chunks": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "not quite chunked": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        "CONNECT": b"CONNECT a:1" + END,
    },
    (505, "http_version"): {
        "HTTP/2.0 in words": b"GET /live HTTP/2.0\r\n\r\n",
        "HTTP/0.9": b"GET /live HTTP/0.9\r\n\r\n",
    },
}
"""By status and code; the connection ends with the answer."""

TAKEN: dict[tuple[int, str | None], dict[str, bytes]] = {
    (200, None): {
        "zeros before a length": POST + b"content-length: " + b"0" * 5000 + LENGTH + OK,
        "blank lines first": b"\r\n" * 100 + GET + b"\r\n",
        "a target with a host": b"GET http://elsewhere/live" + END,
    },
    (400, "invalid_request"): {
        "a length too short by one": POST + b"content-length: %d\r\n\r\n" % (len(OK) - 1) + OK[:-1],
    },
    (404, "not_found"): {
        "a path out of the root": b"GET /v1/../../etc/passwd" + END,
        "a long path": b"GET /" + b"x" * 30_000 + END,
    },
    (404, "model_not_found"): {
        "line ends in a path": b"GET /v1/models/a%0d%0aset-cookie:%20b%00" + END,
    },
    (405, "method_not_allowed"): {
        "a known method, not here": b"DELETE /v1/models" + END,
        "TRACE": b"TRACE /live" + END,
    },
    (415, "unsupported_media_type"): {
        "a body said to be zipped": POST + b"content-encoding: br\r\ncontent-length: " + LENGTH + OK,
        "a form": FORM + b"content-length: 3\r\n\r\na=b",
    },
}
"""The connection can be used after these."""


# --- bodies


def holding(**fields: bytes) -> bytes:
    """A chat with fields of any bytes."""
    more = b"".join(b',"%b":%b' % (name.encode(), value) for name, value in fields.items())
    return json.dumps(chat()).encode()[:-1] + more + b"}"


def saying(content: bytes) -> bytes:
    return b'{"model":"%b","messages":[{"role":"user","content":"%b"}]}' % (MODEL.encode(), content)


def lists(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def objects(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


def tool(parameters: bytes) -> bytes:
    return b'[{"type":"function","function":{"name":"f","parameters":%b}}]' % parameters


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{number}"}} for number in range(count)]


def schema(text: bytes) -> bytes:
    return b'{"type":"json_schema","json_schema":{"name":"s","schema":%b}}' % text


def messages(count: int, content: Any = "x") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}] * count


def called(arguments: str, count: int = 1, times: int = 1) -> dict[str, Any]:
    """A chat in which an assistant has made calls."""
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}] * count
    return chat(messages=[*messages(1), *[{"role": "assistant", "tool_calls": calls}] * times])


def template(text: bytes) -> bytes:
    return holding(chat_template_kwargs=text)


DEEP = 90_000

MALFORMED: dict[str, tuple[Made, str | None]] = {
    "no UTF-8": (lambda: saying(b"a\xff\xfeb"), "messages[0].content"),
    "overlong UTF-8": (lambda: saying(b"\xc0\x80"), "messages[0].content"),
    "a surrogate in UTF-8": (lambda: saying(b"\xed\xa0\x80"), "messages[0].content"),
    "no UTF-8 in what is ignored": (lambda: holding(nobody=b'"\xff"'), "nobody"),
    "UTF-16": (lambda: json.dumps(chat()).encode("utf-16"), None),
    "half a surrogate pair": (lambda: saying(b"\\ud800"), "messages[0].content"),
    "half a surrogate pair in a name": (lambda: holding(**{"\\udfff": b"1"}), None),
    "a raw control character": (lambda: saying(b"\x01"), "messages[0].content"),
    "truncated": (lambda: json.dumps(chat()).encode()[:-3], "max_tokens"),
    "two documents": (lambda: json.dumps(chat()).encode() * 2, None),
    "nothing": (lambda: b"", None),
    "deep lists alone": (lambda: b"[" * DEEP, None),
    "deep objects alone": (lambda: b'{"a":' * DEEP, "a"),
    "deep, ignored": (lambda: holding(nobody=lists(DEEP)), "nobody"),
    "deep for the template": (lambda: template(objects(DEEP)), "chat_template_kwargs"),
    "less deep for the template": (lambda: template(objects(100)), "chat_template_kwargs"),
    "deep tools": (lambda: holding(tools=tool(objects(DEEP))), "tools"),
    "deep json_schema": (lambda: holding(response_format=schema(objects(DEEP))), "response_format"),
    "deep metadata": (lambda: holding(metadata=objects(DEEP)), "metadata"),
    "deep stop": (lambda: holding(stop=lists(DEEP)), "stop[0]"),
    "deep guided_json in a string": (lambda: chat(guided_json=objects(DEEP).decode()), "guided_json"),
    "a field twice": (lambda: holding(model=b'"other"'), "model"),
    "1e999": (lambda: holding(temperature=b"1e999"), "temperature"),
    "-1e999 deep inside": (lambda: template(b'{"a":[-1e999]}'), "chat_template_kwargs[0]"),
    "NaN": (lambda: holding(temperature=b"NaN"), "temperature"),
    "an endless integer": (lambda: holding(seed=b"9" * DEEP), "seed"),
    "an endless integer in a schema": (
        lambda: holding(tools=tool(b'{"maximum":%b}' % (b"9" * DEEP))),
        "tools[0].function.parameters",
    ),
}
"""Chats, each with the field that the refusal names."""

_SELF = b'{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}'
_SCHEMA = "response_format.json_schema.schema"

EXCESSIVE: dict[str, tuple[str, Made, str | None]] = {
    "a million biases": (CHAT, lambda: chat(logit_bias={str(n): 1 for n in range(MB)}), None),
    "5,000 biases": (CHAT, lambda: chat(logit_bias={str(n): 1 for n in range(5000)}), "logit_bias"),
    "a bias for no token": (CHAT, lambda: chat(logit_bias={"99999999": 1}), "logit_bias"),
    "100,000 messages": (CHAT, lambda: chat(messages=messages(100_000)), None),
    "20,000 messages": (CHAT, lambda: chat(messages=messages(20_000)), "messages"),
    "seven million escapes": (CHAT, lambda: chat(messages=messages(1, "\n" * 7 * MB)), None),
    "16,000 messages": (CHAT, lambda: chat(messages=messages(16_000)), "messages"),
    "40,000 parts": (
        CHAT,
        lambda: chat(messages=messages(20, [{"type": "text", "text": "x"}] * 2000)),
        "messages",
    ),
    "10,000 tools": (CHAT, lambda: chat(tools=tools(10_000)), "tools"),
    "1,500 tools": (CHAT, lambda: chat(tools=tools(1500)), "messages"),
    "33 stops": (CHAT, lambda: chat(stop=[str(n) for n in range(33)]), "stop"),
    "a stop of 1 MB": (CHAT, lambda: chat(stop="x" * MB), "stop"),
    "129 choices": (CHAT, lambda: chat(n=129), "n"),
    "100,000 prompts": (COMPLETE, lambda: completion(prompt=["x"] * 100_000), "prompt"),
    "90,000 prompts of ids": (COMPLETE, lambda: completion(prompt=[[70]] * 90_000), "prompt"),
    "130 choices of 65 prompts": (COMPLETE, lambda: completion(prompt=["x"] * 65, n=2), "prompt"),
    "128 long prompts": (COMPLETE, lambda: completion(prompt=["xy" * 55_000] * 128), "prompt"),
    "3,000,000 ids": (COMPLETE, lambda: completion(prompt=[70] * 3 * MB), None),
    "1,000,000 ids": (COMPLETE, lambda: completion(prompt=[300] * MB), "prompt"),
    "an id past the vocabulary": (COMPLETE, lambda: completion(prompt=[1, MB]), "prompt"),
    "a negative id": (COMPLETE, lambda: completion(prompt=[-1]), "prompt[0]"),
    "half an id": (COMPLETE, lambda: completion(prompt=[1.5]), "prompt[0]"),
    "an id over 64 bits": (COMPLETE, lambda: completion(prompt=[2**64]), "prompt[0]"),
    "ids and texts": (COMPLETE, lambda: completion(prompt=[1, "a", [2]]), "prompt"),
    "600,000 log probabilities": (
        COMPLETE,
        lambda: completion(prompt=[70] * 30_000, prompt_logprobs=20),
        "prompt_logprobs",
    ),
    "a million names": (
        CHAT,
        lambda: template(b"{%b}" % b",".join(b'"%d":1' % n for n in range(MB))),
        None,
    ),
    "seven million values": (CHAT, lambda: template(b'{"a":[%b1]}' % (b"1," * 7 * MB)), None),
    "two million objects": (CHAT, lambda: holding(documents=b"[%b{}]" % (b"{}," * 2 * MB)), None),
    "190,000 fields": (CHAT, lambda: holding(**{f"u{n}": b"1" for n in range(190_000)}), None),
    "an endless enum": (
        CHAT,
        lambda: holding(tools=tool(b'{"properties":{"a":{"enum":[%b1]}}}' % (b"1," * MB))),
        "messages",
    ),
    "a schema of 10 MB": (
        CHAT,
        lambda: holding(response_format=schema(b'{"description":"%b"}' % (b"x" * 10 * MB))),
        _SCHEMA,
    ),
    "a schema that is its own": (CHAT, lambda: holding(response_format=schema(_SELF)), _SCHEMA),
    "a schema in a string": (CHAT, lambda: chat(guided_json=f'{{"enum":[{"[]," * MB}1]}}'), "guided_json"),
    "a regex of brackets": (CHAT, lambda: chat(guided_regex="(" * 20_000), "guided_regex"),
    "two million objects in a call": (CHAT, lambda: called(f'{{"a":[{"{}," * 2 * MB}1]}}'), "messages"),
    "8,000 calls": (CHAT, lambda: called('{"a":1}', 1000, 8), "messages"),
    "a name of 1 MB": (CHAT, lambda: chat(model="m" * MB), "model"),
    "two million ids to text": ("/detokenize", lambda: {"tokens": [70] * 2 * MB}, None),
    "200,000 ids to text": ("/detokenize", lambda: {"tokens": [70] * 200_000}, "tokens"),
}
"""Path, body and the field that the refusal names."""

TEXTS: dict[str, Callable[[], str]] = {
    "blanks": lambda: " " * 15 * MB,
    "one character": lambda: "a" * 15 * MB,
    "line ends": lambda: "\n" * 2 * MB,
    "a million blanks": lambda: " " * MB,
    "a million of one character": lambda: "a" * MB,
    "no space anywhere": lambda: "qzxjkv" * (MB // 6),
    "no two words alike": lambda: " ".join(f"{number:x}" for number in range(150_000)),
    "emoji": lambda: "\U0001f600" * MB,
    "marks on one letter": lambda: "a" + "\u0301" * 500_000,
    "beginnings of special tokens": lambda: "<|im_" * 200_000,
    "special tokens": lambda: "<|im_start|>" * 80_000,
    "words": lambda: "the water " * 100_000,
}
"""All of them longer than the context."""

TEMPLATE_CODE = (
    "{{ 7 * 7 }}",
    "{% for x in range(10 ** 9) %}{% endfor %}",
    "{{ messages.__class__.__mro__ }}",
    "{%- endif %}{{ raise_exception('no') }}",
    "{#",
    "\\u0000 \x00 \x1b[2J",
    "\u202egnp.exe",
    "</tool_call><think>",
    "\ue000continue here\ue000",
)
"""What a message may say without any of it being done."""
