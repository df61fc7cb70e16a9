"""A prompt as vectors, as vLLM's clients send it: base64 of a tensor as `torch.save` writes it, with a row for a token.

A frontend has no torch and passes the text on. What it must know is how many tokens the prompt counts for, so the
tensor's shape is read here: out of the pickle that lies in the file, of which no instruction is carried out. Anything
but one plain tensor is refused, and so is a file that unpacks to more than it is: whoever loads it later is spared.
"""

from __future__ import annotations

import binascii
import hashlib
import io
import math
import pickletools
import struct
import zipfile
from typing import Any, NamedTuple

from kvolt.core.errors import InvalidRequest

PARAM = "prompt_embeds"
_MOST_MEMBERS = 64
_MOST_PICKLE_BYTES = 4096
"""That of one tensor has some hundred."""
_MEMBER = b"PK\x01\x02"
"""How an entry begins in a zip file's directory."""
_TENSOR = "torch._utils _rebuild_tensor_v2"
_VALUE_BYTES = {
    "torch FloatStorage": 4,
    "torch HalfStorage": 2,
    "torch BFloat16Storage": 2,
    "torch DoubleStorage": 8,
}
"""By what a pickle calls the memory of a tensor."""
_HOOKS = "collections OrderedDict"
_MARK = object()
_NO_ZIP = (
    zipfile.BadZipFile,
    struct.error,
    NotImplementedError,
    RuntimeError,
    EOFError,
    OSError,
    OverflowError,
    LookupError,
    ValueError,
)
"""What the standard library raises where a file is none, or is broken."""
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "GLOBAL")
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class PromptEmbeds(NamedTuple):
    """One prompt's."""

    text: str
    """As it came."""
    num_rows: int
    """What the file says: a worker sees whether that is true."""
    digest: str
    """Equal for equal vectors: two such prompts have nothing else to be told apart by."""


class _Tensor(NamedTuple):
    """As a pickle says how to make one."""

    storage: Any
    start: Any
    shape: Any


def read_embeds(text: str) -> PromptEmbeds:
    """InvalidRequest for what is no such tensor. As long as its text is: of long ones beside the loop."""
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise _refusal(f"it is no base64 ({error})") from error
    shape = _shape(_pickle(data), len(data))
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2:
        raise _refusal(f"it has the shape {shape}; wanted are rows of one length, one for each token")
    return PromptEmbeds(text, shape[0], hashlib.blake2b(data, digest_size=16).hexdigest())


def _refusal(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"prompt_embeds must be base64 of one dense tensor as torch.save writes it: {why}", param=PARAM
    )


def _pickle(data: bytes) -> bytes:
    """What says how the tensor is made, out of torch's zip file."""
    if data.count(_MEMBER) > _MOST_MEMBERS:
        raise _refusal("the file has too many members")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            members = file.infolist()
            if any(each.compress_type != zipfile.ZIP_STORED for each in members):
                raise _refusal("the file is compressed")
            if sum(each.file_size for each in members) > len(data):
                raise _refusal("the file's members are larger than the file")
            found = [each for each in members if each.filename.endswith("/data.pkl")]
            if len(found) != 1 or found[0].file_size > _MOST_PICKLE_BYTES:
                raise _refusal("it holds no tensor, or more than one")
            return file.read(found[0])
    except _NO_ZIP as error:
        raise _refusal(f"it is no such file ({error})") from error


def _shape(pickled: bytes, num_bytes: int) -> tuple[int, ...]:
    """Of a tensor whose values are all there, in a file of so many bytes: rows that are one row many times over in it
    would be many in a worker. The pickle is followed by hand, with names in the place of what they name."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            name = opcode.name
            if name in ("PROTO", "FRAME"):
                continue
            if name == "STOP":
                break
            if name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            else:
                _follow(stack, name, argument)
        [made] = stack
        if not isinstance(made, _Tensor):
            raise ValueError("something else")
        return _checked(made, num_bytes)
    except InvalidRequest:
        raise
    except (
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        Warning,
    ) as error:  # of an escape, where these are errors
        raise _refusal("its pickle makes no tensor") from error


def _checked(tensor: _Tensor, num_bytes: int) -> tuple[int, ...]:
    """Its shape. TypeError or ValueError where it is none."""
    (_, kind, _, _, num_values), start, shape = tensor
    if not all(type(each) is int for each in (start, num_values, *shape)):
        raise ValueError("no numbers")
    if kind not in _VALUE_BYTES:
        raise _refusal(f"it holds no floats ({str(kind)[:80]})")
    if not shape or min(shape) < 1:
        raise _refusal("it is empty")
    num_needed = start + math.prod(shape)
    if start < 0 or not num_needed <= num_values <= num_bytes // _VALUE_BYTES[kind]:
        raise _refusal("it has less in it than its shape says: save what .contiguous() gives")
    return tuple(shape)


def _follow(stack: list[Any], name: str, argument: Any) -> None:
    if name in _VALUES:
        stack.append(argument)
    elif name in ("NEWTRUE", "NEWFALSE"):
        stack.append(name == "NEWTRUE")
    elif name == "STACK_GLOBAL":
        last = stack.pop()
        stack.append(f"{stack.pop()} {last}")
    elif name == "MARK":
        stack.append(_MARK)
    elif name in _TUPLES or name == "TUPLE":
        start = len(stack) - _TUPLES[name] if name in _TUPLES else _last_mark(stack)
        items = tuple(each for each in stack[start:] if each is not _MARK)
        if any(type(each) is tuple and any(type(inner) is tuple for inner in each) for each in items):
            raise _refusal("its pickle makes no tensor")  # nor anything else, which may be without end
        stack[start:] = [items]
    elif name == "BINPERSID":
        pass  # what names a tensor's memory stands for it
    elif name == "REDUCE":
        given, maker = stack.pop(), stack.pop()
        if maker == _TENSOR:
            stack.append(_Tensor(*given[:3]))
        elif maker == _HOOKS and given == ():
            stack.append("hooks")
        else:
            raise _refusal(
                f"its pickle asks for {maker[:80] if isinstance(maker, str) else 'something else'!r}"
            )
    else:
        raise _refusal(f"its pickle has {name}")


def _last_mark(stack: list[Any]) -> int:
    for index in range(len(stack) - 1, -1, -1):
        if stack[index] is _MARK:
            return index
    raise ValueError("no mark")
