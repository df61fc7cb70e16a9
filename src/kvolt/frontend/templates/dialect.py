"""Hugging Face's dialect of Jinja, in two environments that accept the same templates.

`wide` has the full dialect. It limits loop steps and plain repetition, for clear errors, but an expression can still
use any amount of memory or time (`'a'.center(10**9)`), so it runs in a separate process (`process`).

`narrow` runs on the event loop. It accepts plain templates only (`is_plain`): their operations produce at most a
multiple of their operands, and containers are the request's values or flat lists of them. Output and steps are
charged to an allowance; a rendering that exceeds it raises `Beyond`.

Neither evaluates constant expressions at compile time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2 import filters as jinja_filters
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from kvolt.core.errors import ConfigError
from kvolt.frontend.templates.plain import METHODS, PLAIN_FILTERS, is_plain
from kvolt.frontend.templates.traits import TemplateTraits, read_traits

FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions of template expressions; RuntimeError includes too deep recursion."""

MAX_STEPS = 500_000
"""Limit of loop steps of a rendering: some templates iterate over all messages for each message."""

MAX_REPEATED = 16 * 1024 * 1024

INLINE_UNITS = 2 * 1024 * 1024
"""Allowance of a rendering on the event loop: characters produced, and `_STEP_UNITS` per loop step."""

_STEP_UNITS = 64
_CHECK_UNITS = 1024
STRFTIME_NOW = "strftime_now"
_TICK = "_tick"
_CHARGED = "_charged"


class Beyond(Exception):
    """The rendering exceeds its allowance on the event loop."""


class RenderContext(Context):
    """Variables of one rendering, and its remaining allowance."""

    units_left = MAX_STEPS * _STEP_UNITS
    check_at = 0
    """The clock and the allowance are checked when fewer units are left."""
    inline = False
    now: Callable[[], float] | None = None
    deadline = 0.0

    def limit(self, now: Callable[[], float] | None, max_s: float) -> None:
        """Apply the limits of the event loop to this rendering."""
        self.inline, self.units_left, self.now = True, INLINE_UNITS, now
        if now is not None:
            self.deadline = now() + max_s
            self.check_at = INLINE_UNITS - _CHECK_UNITS

    def charge(self, units: int) -> None:
        left = self.units_left = self.units_left - units
        if left < self.check_at:
            self.check()

    def check(self) -> None:
        is_late = self.now is not None and self.now() > self.deadline
        if self.units_left >= 0 and not is_late:
            self.check_at = max(self.units_left - _CHECK_UNITS, 0)
        elif self.inline:
            raise Beyond("the rendering takes too long for the event loop")
        else:
            raise TemplateError(f"its loops take more than {MAX_STEPS} steps")

    def join_texts(self, values: Sequence[Any]) -> str:
        """The operator `~`."""
        text = "".join(map(str, values))
        if self.inline:
            self.charge(len(text))
        return text


@pass_context
def _tick(context: RenderContext, value: Any) -> Any:
    left = context.units_left = context.units_left - _STEP_UNITS
    if left < context.check_at:
        context.check()
    return value


@pass_context
def _charged(context: RenderContext, text: str) -> str:
    if context.inline:
        context.charge(len(text))
    return text


class _Code(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("context.join_texts((")
        for value in node.nodes:
            self.visit(value, frame)
            self.write(", ")
        self.write("))")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class QuietNamespace(Namespace):
    """Printed by its name only: attributes may contain the same text many times."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(Extension):
    """`{% generation %}` marks model output for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _Code
    context_class = RenderContext

    def __init__(self) -> None:
        extensions: list[str | type[Extension]] = [_GenerationTag, LoopControlExtension]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.filters |= {"tojson": to_json, _TICK: _tick, _CHARGED: _charged}
        self.globals |= {"raise_exception": _raise_exception, "namespace": QuietNamespace}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Like the sandbox's, but faster for common attributes of templates: `message.role`, `loop.last`, `ns.index`,
        `content.strip`. None of these can reach Python or modify its object."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind in _HARMLESS and not attribute.startswith(("_", "format")) and hasattr(obj, attribute):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _Wide(_Sandbox):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sized, times = (left, right) if isinstance(left, Sized) else (right, left)
        if isinstance(sized, Sized) and isinstance(times, int) and len(sized) * times > MAX_REPEATED:
            raise TemplateError(f"it repeats something {times} times")
        if operator == "**" and (abs(left) > 2**64 or abs(right) > 64):
            raise TemplateError("it computes too large a power")
        return super().call_binop(context, operator, left, right)


class _Narrow(_Sandbox):
    intercepted_binops = frozenset({"+", "%"})

    @staticmethod
    def concat(texts: Iterable[str]) -> str:
        """Join the outputs of a macro or an assigned block."""
        parts = list(texts)
        if sum(map(len, parts)) > INLINE_UNITS:
            raise Beyond("a block of text is long")
        return "".join(parts)

    def __init__(self) -> None:
        super().__init__()
        for name in PLAIN_FILTERS:
            self.filters[name] = _NARROW_FILTERS.get(name) or _measured(self.filters[name])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            result = left + right
            kind = type(result)
            if kind is str:
                context.charge(len(result))  # type: ignore[attr-defined]
            elif kind is not int and kind is not float:
                raise Beyond("a list is built")
            return result
        if isinstance(left, str):
            raise Beyond("a format")
        return left % right

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(obj) is BuiltinMethodType:
            _charge_method(context, obj, args)  # type: ignore[arg-type]
            kwargs.pop("_loop_vars", None)  # added by the compiler for functions with context
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        if type(obj) is not Macro and getattr(obj, "__name__", "") not in _FUNCTION_NAMES:
            raise Beyond("a function")
        for text in args:  # a recursive macro keeps them
            if type(text) is str:
                context.charge(len(text))  # type: ignore[attr-defined]
        result = context.call(obj, *args, **kwargs)
        if type(result) is str:
            context.charge(len(result))  # type: ignore[attr-defined]
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Like the sandbox's, but without methods: `is_plain` has not checked the name in `x['center']`."""
        try:
            return obj[argument]
        except (TypeError, LookupError):
            if isinstance(argument, str) and hasattr(obj, argument):
                raise Beyond("a method by its name") from None
        return self.undefined(obj=obj, name=argument)


def _charge_method(context: RenderContext, method: Any, arguments: tuple[Any, ...]) -> None:
    owner, name = method.__self__, method.__name__
    if name not in METHODS:
        raise Beyond(f"the method {name}")
    if type(owner) is not str:
        return  # a view of a dict, or one of its values
    units = len(owner)
    if name == "join":
        (texts,) = arguments
        if not isinstance(texts, list | tuple):
            raise Beyond("a list is built")
        units = sum(map(len, texts)) + len(owner) * len(texts)
    elif name == "replace":
        units += owner.count(arguments[0]) * len(arguments[1])
    context.charge(units)


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter to charge its input and its text output."""

    @pass_context
    def measured(context: RenderContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        context.charge(len(value) if type(value) in _SIZED else 1)
        result = function(value, *args, **kwargs)
        if type(result) is str:
            context.charge(len(result))
        return result

    return measured


def _with_context(function: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def charged(context: RenderContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        context.charge(_STEP_UNITS * (len(value) + 1 if type(value) in _SIZED else 1))
        return function(context, value, *args, **kwargs)

    return charged


@pass_context
def _first(context: RenderContext, values: Any) -> Any:
    return jinja_filters.sync_do_first(context.environment, values)


@pass_context
def _last(context: RenderContext, values: Any) -> Any:
    return jinja_filters.do_last(context.environment, values)


@pass_context
def _join(context: RenderContext, values: Any, separator: str = "") -> str:
    texts = list(map(str, values))
    context.charge(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


_NARROW_FILTERS: dict[str, Callable[..., Any]] = {
    "first": _first,
    "join": _join,
    "last": _last,
    "list": _measured(list),
    "map": _with_context(jinja_filters.sync_do_map),
    "reject": _with_context(jinja_filters.sync_do_reject),
    "rejectattr": _with_context(jinja_filters.sync_do_rejectattr),
    "select": _with_context(jinja_filters.sync_do_select),
    "selectattr": _with_context(jinja_filters.sync_do_selectattr),
}


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


_FUNCTION_NAMES = frozenset(
    {QuietNamespace.__name__, STRFTIME_NOW, safe_range.__name__, _raise_exception.__name__}
)
_SIZED = frozenset({str, list, dict, tuple})
_DICT_ATTRIBUTES = frozenset(dir(dict))
_HARMLESS = frozenset({LoopContext, QuietNamespace, str})


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Like Jinja's `tojson`, but without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_WIDE = _Wide()
_NARROW = _Narrow()


class CompiledTemplate:
    """A template source: its input requirements, and its code for both environments."""

    def __init__(self, source: str) -> None:
        tree = _WIDE.parse(source)
        self.traits: TemplateTraits = read_traits(source, tree)
        self.wide: Template = _WIDE.from_string(_with_charges(tree, _WIDE))
        self.narrow: Template | None = None
        plain = _NARROW.parse(source)
        if is_plain(plain):
            self.narrow = _NARROW.from_string(_with_charges(plain, _NARROW))


def _with_charges(tree: nodes.Template, environment: _Sandbox) -> nodes.Template:
    """Add a step counter to every body that can repeat, and charge the contents of text blocks."""

    def tick(line: int) -> nodes.Filter:
        return nodes.Filter(nodes.Const(True), _TICK, [], [], None, None, lineno=line)

    bodies: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *tree.find_all(nodes.For),
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for repeated in bodies:
        line = repeated.lineno
        repeated.body.insert(0, nodes.ExprStmt(tick(line), lineno=line))
        if isinstance(repeated, nodes.For) and repeated.test is not None:
            repeated.test = nodes.And(tick(line), repeated.test, lineno=line)
    for block in tree.find_all(nodes.AssignBlock):
        block.filter = nodes.Filter(block.filter, _CHARGED, [], [], None, None, lineno=block.lineno)
    tree.set_environment(environment)
    return tree


@lru_cache(maxsize=64)
def compiled(source: str) -> CompiledTemplate:
    """Compile a template; raises ConfigError if it is invalid."""
    try:
        return CompiledTemplate(source)
    except (*FAILURES, SyntaxError, MemoryError) as error:
        raise ConfigError(
            f"the chat template does not compile: {str(error)[:500] or type(error).__name__}",
            key="chat_template",
            remedy="use the model's own template, or one in Hugging Face's dialect",
        ) from error
