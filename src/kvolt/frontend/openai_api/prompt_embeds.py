"""Prompt embeddings as sent by vLLM's clients: base64 of a tensor written by `torch.save`, one row per token.

The frontend has no torch and passes the text on. It needs the number of prompt tokens, so it reads the shape from the
pickle in the file without executing any of its instructions. Anything but one plain tensor is rejected, and so is a
file that would unpack to more than its size, which protects the worker that loads it.
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
_MAX_MEMBERS = 64
_MAX_PICKLE_BYTES = 4096
"""The pickle of a single tensor has some hundred bytes."""
_MEMBER = b"PK\x01\x02"
"""Signature of an entry in a zip file's directory."""
_TENSOR = "torch._utils _rebuild_tensor_v2"
_VALUE_BYTES = {
    "torch FloatStorage": 4,
    "torch HalfStorage": 2,
    "torch BFloat16Storage": 2,
    "torch DoubleStorage": 8,
}
"""Bytes per value by the pickle name of a tensor's storage."""
_HOOKS = "collections OrderedDict"
_MARK = object()
_INVALID_FILE = (
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
"""Exceptions of the standard library for an invalid or corrupt file."""
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "GLOBAL")
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class PromptEmbeds(NamedTuple):
    """Embeddings of one prompt."""

    text: str
    """The base64 text as received."""
    num_rows: int
    """Number of rows according to the file; the worker verifies it."""
    digest: str
    """Equal for equal embeddings, which have no token ids to distinguish them."""


class _Tensor(NamedTuple):
    """A tensor's constructor arguments in the pickle."""

    storage: Any
    start: Any
    shape: Any


def read_embeds(text: str) -> PromptEmbeds:
    """Decode and validate embeddings; raises InvalidRequest. Takes time proportional to the text."""
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise _refusal(f"invalid base64 ({error})") from error
    shape = _shape(_pickle(data), len(data))
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2:
        raise _refusal(f"the shape is {shape}; expected two dimensions, one row per token")
    return PromptEmbeds(text, shape[0], hashlib.blake2b(data, digest_size=16).hexdigest())


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"prompt_embeds must be base64 of one dense tensor written by torch.save: {reason}", param=PARAM
    )


def _pickle(data: bytes) -> bytes:
    """Extract the pickle that describes the tensor from torch's zip file."""
    if data.count(_MEMBER) > _MAX_MEMBERS:
        raise _refusal("the file has too many members")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            members = file.infolist()
            if any(each.compress_type != zipfile.ZIP_STORED for each in members):
                raise _refusal("the file is compressed")
            if sum(each.file_size for each in members) > len(data):
                raise _refusal("the file's members are larger than the file")
            pickles = [each for each in members if each.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE_BYTES:
                raise _refusal("the file must contain exactly one tensor")
            return file.read(pickles[0])
    except _INVALID_FILE as error:
        raise _refusal(f"invalid file ({error})") from error


def _shape(pickled: bytes, num_bytes: int) -> tuple[int, ...]:
    """Shape of the tensor, whose values must all be in the file of `num_bytes` bytes: a row repeated by strides would
    expand in the worker. The pickle is interpreted here, with names in place of the objects that they name."""
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
                _execute(stack, name, argument)
        [tensor] = stack
        if not isinstance(tensor, _Tensor):
            raise ValueError("not a tensor")
        return _checked(tensor, num_bytes)
    except InvalidRequest:
        raise
    except (
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        Warning,
    ) as error:  # Warning: invalid escapes, where warnings are errors
        raise _refusal("the pickle does not contain a tensor") from error


def _checked(tensor: _Tensor, num_bytes: int) -> tuple[int, ...]:
    """Validate the tensor and return its shape; raises TypeError or ValueError if it is malformed."""
    (_, kind, _, _, num_values), start, shape = tensor
    if not all(type(each) is int for each in (start, num_values, *shape)):
        raise ValueError("not integers")
    if kind not in _VALUE_BYTES:
        raise _refusal(f"the values are not floats ({str(kind)[:80]})")
    if not shape or min(shape) < 1:
        raise _refusal("the tensor is empty")
    num_needed = start + math.prod(shape)
    if start < 0 or not num_needed <= num_values <= num_bytes // _VALUE_BYTES[kind]:
        raise _refusal("the file has fewer values than the shape: save the result of .contiguous()")
    return tuple(shape)


def _execute(stack: list[Any], name: str, argument: Any) -> None:
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
            raise _refusal("the pickle does not contain a tensor")  # nested tuples could grow without limit
        stack[start:] = [items]
    elif name == "BINPERSID":
        pass  # the storage's name stands for the storage
    elif name == "REDUCE":
        arguments, maker = stack.pop(), stack.pop()
        if maker == _TENSOR:
            stack.append(_Tensor(*arguments[:3]))
        elif maker == _HOOKS and arguments == ():
            stack.append("hooks")
        else:
            raise _refusal(
                f"the pickle calls {maker[:80] if isinstance(maker, str) else 'an unknown object'!r}"
            )
    else:
        raise _refusal(f"the pickle contains {name}")


def _last_mark(stack: list[Any]) -> int:
    for index in range(len(stack) - 1, -1, -1):
        if stack[index] is _MARK:
            return index
    raise ValueError("no mark")
