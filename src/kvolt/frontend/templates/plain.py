"""Detection of plain templates: each operation produces at most a multiple of its operands.

An allow-list of statements, expressions, filters and methods. Other templates are valid, but rendered in a separate
process. Excluded are: widths and counts that produce text (`center`, `*`, `format`, `indent`), lists and dicts built
by the template, which could contain one text many times, and values that could be called under an unchecked name.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

MAX_NODES = 4096
"""Limit of the nodes of a plain template; bounds the work between two loop steps."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


METHODS = _names(
    """
    capitalize count endswith find get index isalnum isalpha isdecimal isdigit islower isnumeric isspace
    istitle isupper items join keys lower lstrip partition removeprefix removesuffix replace rfind rindex
    rpartition rsplit rstrip split splitlines startswith strip swapcase title upper values
    """
)
"""Methods of strings and dicts. The cost of `join` and `replace` is measured before they run."""

PLAIN_FILTERS = _names(
    """
    abs capitalize count d default first float int items join last length list lower map reject rejectattr
    reverse select selectattr string title tojson trim upper
    """
)

_FUNCTIONS = frozenset({"namespace", "raise_exception", "range", "strftime_now"})
_OTHER_NAMES = frozenset(
    {"caller", "cycler", "dict", "joiner", "kwargs", "lipsum", "self", "super", "varargs"}
)
_METHODS_OF_VALUES = frozenset(
    name for kind in (str, dict, list, tuple, int, float) for name in dir(kind) if not name.startswith("_")
)
_MAX_CONCATENATED = 16
_MAX_INDENT = 8
_MAX_FORMAT_CHARS = 64

_NODES = tuple(
    getattr(nodes, name)
    for name in _names(
        """
        Add And Assign AssignBlock Break Call Compare Concat CondExpr Const Continue Dict Div Filter
        FloorDiv For Getattr Getitem If Keyword List Macro Mod NSRef Name Neg Not Operand Or Output Pair
        Pos Scope Slice Sub TemplateData Test Tuple
        """
    )
)


def is_plain(tree: nodes.Template) -> bool:
    all_nodes = list(_below(tree))
    if len(all_nodes) > MAX_NODES:
        return False
    macros = {node.name for node in all_nodes if isinstance(node, nodes.Macro)}
    stored = {node.name for node in all_nodes if isinstance(node, nodes.Name) and node.ctx != "load"}
    callable_names = (macros | _FUNCTIONS) - stored
    called = {id(node.node) for node in all_nodes if isinstance(node, nodes.Call)}
    tested = {id(node.node) for node in all_nodes if isinstance(node, nodes.Test) and node.name == "defined"}
    return all(
        isinstance(node, _NODES)
        and (id(node) in tested or _is_plain_node(node, callable_names, id(node) in called))
        for node in all_nodes
    )


def _below(node: nodes.Node) -> Iterator[nodes.Node]:
    for child in node.iter_child_nodes():
        yield child
        yield from _below(child)


def _is_plain_node(node: nodes.Node, callable_names: set[str], is_called: bool) -> bool:
    match node:
        case nodes.For():
            return not node.recursive
        case nodes.Name():
            return node.name not in _OTHER_NAMES and (is_called or node.name not in _FUNCTIONS)
        case nodes.NSRef():
            return node.attr not in _METHODS_OF_VALUES
        case nodes.Getattr():
            return node.attr in METHODS if is_called else node.attr not in _METHODS_OF_VALUES - METHODS
        case nodes.Concat():
            return len(node.nodes) <= _MAX_CONCATENATED
        case nodes.List() | nodes.Tuple():
            constant = all(isinstance(item, nodes.Const) for item in node.items)
            return constant or (isinstance(node, nodes.Tuple) and node.ctx == "store")
        case nodes.Dict():
            return not node.items
        case nodes.Call():
            return _is_plain_call(node, callable_names)
        case nodes.Filter():
            return _is_plain_filter(node)
    return True


def _is_plain_call(node: nodes.Call, callable_names: set[str]) -> bool:
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if node.kwargs and not (isinstance(node.node, nodes.Name) and node.node.name == "namespace"):
        return False
    if isinstance(node.node, nodes.Getattr):
        return True  # checked by its name
    if not isinstance(node.node, nodes.Name) or node.node.name not in callable_names:
        return False
    if node.node.name == "strftime_now":
        form = node.args[0] if len(node.args) == 1 else None
        return isinstance(form, nodes.Const) and len(str(form.value)) <= _MAX_FORMAT_CHARS
    return True


def _is_plain_filter(node: nodes.Filter) -> bool:
    if node.name not in PLAIN_FILTERS or node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if node.name == "join":
        return not node.kwargs and len(node.args) <= 1
    if node.name == "map":
        names = [argument.value for argument in node.args if isinstance(argument, nodes.Const)]
        return len(names) == len(node.args) <= 1 and (not names or names[0] in PLAIN_FILTERS)
    if node.name == "tojson":
        indents = [*node.args[1:2], *(each.value for each in node.kwargs if each.key == "indent")]
        return all(
            isinstance(each, nodes.Const) and each.value in (None, *range(_MAX_INDENT + 1))
            for each in indents
        )
    return True
