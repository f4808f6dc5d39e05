"""Reads C++ and CUDA sources of a tree: preprocessed, parsed, and with the line of every node.

Headers of the tree are followed; those of the system are not, and what they define stays a name
without a meaning. Nothing here is run.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tree_sitter_cpp
from pcpp import Action, OutputDirective, Preprocessor
from tree_sitter import Language, Parser

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tree_sitter import Node

    from overlay.trees.match import Tree

_ROOT = "/tree-of-the-store"  # no folder: the preprocessor wants absolute paths, and opens none
_QUALIFIERS = ("__device__", "__global__", "__forceinline__", "__host__", "__restrict__")
_LANGUAGE = Language(tree_sitter_cpp.language())
_INCLUDES = ("include", "csrc")
# What can hold functions and constants
_SCOPES = ("translation_unit", "namespace_definition", "declaration_list", "linkage_specification")
# ``(x) && y`` is a cast of ``&&y`` to a parser that doesn't know what ``x`` is
_NO_CAST = re.compile(r"(?<=[=<,(!|&])(\s*)\(([A-Za-z_]\w*(?:::\w+)*)\)(?=\s*(?:&&|\|\|))")
MAX_BYTES = 4 << 20  # of one source; dispatch code is a hundredth of that


class NotUnderstoodError(Exception):
    """A source says something that isn't understood here. Becomes ``unknown``, never a refusal."""

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(f"{what} ({where})" if where else what)
        self.what, self.where = what, where


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function definition.

    Attributes:
        name: without scope.
        parameters: name, declared type, and whether it is a reference, of each.
        template: names of its template's parameters and their defaults; None without a template.
        returns: declared type.
        body: its block.
        launches: whether the body itself starts a kernel.
        sound: whether all of it could be parsed.
    """

    name: str
    parameters: tuple[tuple[str, str, bool], ...]
    template: tuple[tuple[str, Node | None], ...] | None
    returns: str
    body: Node
    launches: bool
    sound: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Struct:
    """A struct definition, or one specialisation of a template."""

    name: str
    specialised: tuple[Node, ...] | None
    template: tuple[tuple[str, Node | None], ...]
    bases: tuple[Node, ...]
    body: Node


@dataclass(slots=True)
class Unit:
    """What one source defines, together with the headers of the tree that it includes."""

    path: str
    functions: dict[str, list[Function]] = field(default_factory=dict)
    structs: dict[str, list[Struct]] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)
    constants: dict[str, Node] = field(default_factory=dict)
    aliases: dict[str, tuple[tuple[str, ...], Node]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def where(self, node: Node) -> str:
        """``file:line`` of a node in the tree's own files."""
        return self.lines[node.start_point[0]]


class _Reader(Preprocessor):  # type: ignore[misc]
    """Takes files from a tree alone."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self._tree = tree
        self.line_directive = "#line"
        self.trouble = ""
        for word in _QUALIFIERS:
            self.define(f"{word} ")
        for folder in _INCLUDES:
            self.add_path(f"{_ROOT}/{folder}")

    def on_file_open(self, is_system_include: bool, includepath: str) -> io.StringIO:
        """A file of the tree."""
        del is_system_include
        path = _inside(includepath)
        text = path and read_text(self._tree, path)
        if not text:
            raise OSError(includepath)
        return io.StringIO(text)

    def on_include_not_found(self, *_: object) -> None:
        """A system's header: what it defines stays unknown."""
        raise OutputDirective(Action.IgnoreAndRemove)

    def on_error(self, file: str, line: int, msg: str) -> None:
        """Remember; the caller decides."""
        self.trouble = self.trouble or f"{_inside(file) or file}:{line}: {msg}"


def read_text(tree: Tree, path: str) -> str | None:
    """A text of the tree, or None.

    Raises:
        NotUnderstoodError: it is a link, far too big, or not UTF-8.
    """
    entry = tree.get(path.encode())
    if entry is None:
        return None
    if entry.mode not in (0o100644, 0o100755) or len(entry.data) > MAX_BYTES:
        raise NotUnderstoodError("no ordinary source file", path)
    try:
        return entry.data.decode()
    except UnicodeDecodeError:
        raise NotUnderstoodError("not UTF-8", path) from None


def read_unit(tree: Tree, path: str) -> Unit:
    """Preprocess and parse one source.

    Raises:
        NotUnderstoodError: it isn't there, or can't be preprocessed.
    """
    text = read_text(tree, path)
    if text is None:
        raise NotUnderstoodError("no such file", path)
    reader, out = _Reader(tree), io.StringIO()
    try:
        reader.parse(text, f"{_ROOT}/{path}")
        reader.write(out)
    except NotUnderstoodError:
        raise
    except Exception as error:  # it has no base class of its own for what it can't read
        raise NotUnderstoodError(f"can't be preprocessed: {error!r}", path) from None
    if reader.trouble:
        raise NotUnderstoodError(f"can't be preprocessed: {reader.trouble}", path)
    unit = Unit(path)
    source = _with_lines(out.getvalue(), unit)
    root = Parser(_LANGUAGE).parse(source.encode()).root_node
    for node in _definitions(root):
        _define(unit, node)
    return unit


def _inside(path: str) -> str:
    """Where in the tree; empty for what leads out of it."""
    _, root, rest = path.partition(_ROOT.lstrip("/") + "/")
    clean = posixpath.normpath(rest.replace(os.sep, "/"))
    return clean if root and not clean.startswith("..") else ""


def _with_lines(text: str, unit: Unit) -> str:
    """Take the line directives out, and note what every line that stays is a line of."""
    kept = []
    file, number = unit.path, 1
    for line in text.splitlines():
        if directive := re.fullmatch(r'#line (\d+) "(.*)"', line):
            number = int(directive[1])
            file = _inside(directive[2]) or file
            continue
        kept.append(_NO_CAST.sub(r"\1 \2 ", line))
        unit.lines.append(f"{file}:{number}")
        number += 1
    unit.lines.append(f"{file}:{number}")
    return "\n".join(kept) + "\n"


def _definitions(node: Node) -> Iterator[Node]:
    for child in node.named_children:
        if child.type in _SCOPES:
            yield from _definitions(child)
        else:
            yield child


def _define(unit: Unit, node: Node) -> None:
    template: Sequence[Node] | None = None
    if node.type == "template_declaration":
        template = node.named_children[0].named_children
        node = node.named_children[-1]
    if node.type == "function_definition":
        if function := function_of(node, template):
            unit.functions.setdefault(function.name, []).append(function)
    elif node.type in ("struct_specifier", "class_specifier"):
        _define_struct(unit, node, template)
    elif node.type == "alias_declaration":
        _define_alias(unit, node, template)
    elif node.type == "enum_specifier":
        _define_enum(unit, node)
    elif node.type == "declaration" and template is None:
        _define_constants(unit, node)


def _define_constants(unit: Unit, node: Node) -> None:
    for child in node.named_children:
        name, value = (child.child_by_field_name(n) for n in ("declarator", "value"))
        if child.type == "init_declarator" and name is not None and value is not None:
            unit.constants[text_of(name)] = value


def _define_alias(unit: Unit, node: Node, template: Sequence[Node] | None) -> None:
    name, kind = (node.child_by_field_name(n) for n in ("name", "type"))
    if name is not None and kind is not None:
        names = tuple(_template_parameter(p)[0] for p in template or ())
        unit.aliases[text_of(name)] = (names, kind)


def function_of(node: Node, template: Sequence[Node] | None) -> Function | None:
    """What a ``function_definition`` defines; None for an operator or a constructor of sorts."""
    declarator = node.child_by_field_name("declarator")
    while declarator is not None and declarator.type != "function_declarator":
        declarator = declarator.child_by_field_name("declarator")  # a pointer's or reference's
    body = node.child_by_field_name("body")
    if declarator is None or body is None:
        return None
    name = declarator.child_by_field_name("declarator")
    parameters = declarator.child_by_field_name("parameters")
    returns = node.child_by_field_name("type")
    if name is None or parameters is None:
        return None
    text = text_of(body)
    return Function(
        name=text_of(name),
        parameters=tuple(parameter_of(p) for p in parameters.named_children if p.type != "comment"),
        template=None if template is None else tuple(_template_parameter(p) for p in template),
        returns=text_of(returns) if returns is not None else "",
        body=body,
        launches="<<<" in text or "cudaLaunchKernel" in text,
        sound=not node.has_error,
    )


def parameter_of(node: Node) -> tuple[str, str, bool]:
    """Name, type and whether it is a reference; the name is empty where a parameter has none."""
    declarator, kind = node.child_by_field_name("declarator"), node.child_by_field_name("type")
    text = text_of(declarator) if declarator is not None else ""
    name = re.search(r"([A-Za-z_]\w*)$", text)
    return name[1] if name else "", text_of(kind) if kind is not None else "", "&" in text


def _template_parameter(node: Node) -> tuple[str, Node | None]:
    default = node.child_by_field_name("default_value") or node.child_by_field_name("default_type")
    if node.type == "optional_parameter_declaration":
        return parameter_of(node)[0], default
    if node.type == "parameter_declaration":
        return parameter_of(node)[0], None
    return text_of(node.named_children[0]) if node.named_children else "", default


def _define_struct(unit: Unit, node: Node, template: Sequence[Node] | None) -> None:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    if name is None or body is None:
        return
    specialised = None
    if name.type == "template_type":
        arguments = name.child_by_field_name("arguments")
        specialised = tuple(arguments.named_children) if arguments is not None else ()
        name = name.child_by_field_name("name") or name
    bases = [c for c in node.named_children if c.type == "base_class_clause"]
    unit.structs.setdefault(text_of(name), []).append(
        Struct(
            name=text_of(name),
            specialised=specialised,
            template=tuple(_template_parameter(p) for p in template or ()),
            bases=tuple(b for clause in bases for b in clause.named_children),
            body=body,
        )
    )


def _define_enum(unit: Unit, node: Node) -> None:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    if name is None or body is None:
        return
    values: dict[str, int] = {}
    following = 0
    for item in body.named_children:
        if item.type != "enumerator":
            continue
        stated = item.child_by_field_name("value")
        if stated is not None:
            try:
                following = int(text_of(stated), 0)
            except ValueError:
                return  # an expression: no value of this enum is known
        values[text_of(item.child_by_field_name("name") or item)] = following
        following += 1
    unit.enums[text_of(name)] = values


def as_expression(node: Node) -> Node:
    """What was parsed as a type, parsed as an expression, on the same line."""
    text = b"\n" * node.start_point[0] + b"auto x = (" + text_of(node).encode() + b");"
    declared = Parser(_LANGUAGE).parse(text).root_node.named_children[0]
    value = declared.named_children[-1].child_by_field_name("value")
    return value if value is not None else node


def text_of(node: Node) -> str:
    """A node's source, on one line."""
    return " ".join((node.text or b"").decode().split())


def names_in(node: Node) -> set[str]:
    """Bare names in an expression."""
    if node.type == "identifier":
        return {text_of(node)}
    if node.type == "qualified_identifier":
        return set()
    return set().union(*(names_in(child) for child in node.named_children))
