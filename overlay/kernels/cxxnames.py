"""What names mean in dispatch code: locals, constants, enumerators, types and their members."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from overlay.kernels.cxx import (
    Function,
    NotUnderstoodError,
    Struct,
    Unit,
    as_expression,
    function_of,
    text_of,
)
from overlay.kernels.cxxvalues import (
    BUILTINS,
    Braced,
    Frame,
    Kind,
    Object,
    Opaque,
    copied,
    truth,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tree_sitter import Node

    Expression = Callable[[Frame], Any]

_NAMES = ("identifier", "type_identifier", "namespace_identifier", "field_identifier")


class Names:
    """Names of one unit. ``overlay.kernels.cxxexpressions`` adds what is done with them."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._constants: dict[str, Any] = {}
        self._members: dict[tuple[Kind, str], Any] = {}
        self._fields: dict[int, list[tuple[str, str, Node | None]]] = {}
        self._definitions: dict[Kind, Struct] = {}

    def expression(self, node: Node) -> Expression:
        """The meaning of an expression."""
        raise NotImplementedError

    def enter(
        self, function: Function, given: Sequence[Any], template: Sequence[Any] | None, where: str,
        outer: Frame | None = None,
    ) -> Any:  # fmt: skip
        """Evaluate a function's body."""
        raise NotImplementedError

    def fits(self, value: Any, kind: str) -> Any:
        """What a value becomes where a type is declared: ``{...}`` and bare values make structs.

        Raises:
            NotUnderstoodError: it can't be told.
        """
        if isinstance(value, (int, Object)) and kind not in self.unit.structs:
            return value
        name = kind.split("::")[-1].split("<")[0].strip()
        if name == "Array" and isinstance(value, Braced):
            return list(value.values)
        if name not in self.unit.structs:
            if isinstance(value, Braced):
                if len(value.values) > 1:
                    return Opaque(kind)
                return value.values[0] if value.values else 0
            return value
        if isinstance(value, (Object, Opaque)):
            return value
        struct = self._struct(Kind(name))
        values = value.values if isinstance(value, Braced) else (value,)
        constructed = self._construct(struct, values)
        if constructed is not None:
            return constructed
        if not isinstance(value, Braced):
            raise NotUnderstoodError(f"makes a {name} of a {type(value).__name__}")
        return self._aggregate(struct, values)

    def puzzle(self, what: str, node: Node) -> Expression:
        """An expression that raises when it is evaluated."""
        where = self.unit.where(node)

        def fail(_: Frame) -> Any:
            raise NotUnderstoodError(what, where)

        return fail

    # Names and constants

    def name(self, frame: Frame, name: str) -> Any:
        """The value that a name has, or something opaque of that name."""
        holder = frame.holder(name)
        if holder is not None:
            return holder.names[name]
        if name in self.unit.constants:
            if name not in self._constants:
                self._constants[name] = Opaque(name)  # should it be made of itself
                with contextlib.suppress(NotUnderstoodError):
                    self._constants[name] = self.expression(self.unit.constants[name])(Frame())
            return self._constants[name]
        return BUILTINS.get(name, Opaque(name))

    def identifier(self, node: Node) -> Expression:
        """A bare name."""
        name = text_of(node)
        return lambda frame: self.name(frame, name)

    def qualified(self, node: Node) -> Expression:
        """``scope::name``."""
        scope, name = last_two(node)
        last, text = text_of(name), text_of(node)
        if scope is None or name.type not in _NAMES:
            return self.puzzle(f"can't read '{text}'", node)
        if scope.type == "decltype":
            # Of an integral constant, which is the integer itself here
            inner = self.expression(scope.named_children[0])
            return inner if last == "value" else self.puzzle(f"can't read '{text}'", node)
        owner = text_of(scope)
        if owner in self.unit.enums:
            value = self.unit.enums[owner].get(last)
            if value is None:
                return self.puzzle(f"{owner} has no {last}", node)
            return lambda _: value
        kind = self.kind(scope)

        def value_of(frame: Frame) -> Any:
            made = kind(frame)
            if made.name in self.unit.structs:
                try:
                    return self.member(made, last, text)
                except NotUnderstoodError:
                    return Opaque(text)
            if made.name == owner and scope.type == "namespace_identifier":
                return self.name(frame, last)
            return Opaque(text)

        return value_of

    # Types

    def kind(self, node: Node) -> Callable[[Frame], Kind]:
        """The type that a node names."""
        if node.type == "type_descriptor":
            inner = node.child_by_field_name("type")
            return self.kind(inner) if inner is not None else lambda _: Kind(text_of(node))
        if node.type == "qualified_identifier":
            return self.kind(last_two(node)[1])
        if node.type == "template_type":
            name = text_of(node.child_by_field_name("name") or node)
            arguments = self.template_arguments(node)
            return lambda frame: self._made_kind(name, tuple(a(frame) for a in arguments))
        text = text_of(node)

        def named(frame: Frame) -> Kind:
            holder = frame.holder(text)
            found = holder.names[text] if holder is not None else None
            return found if isinstance(found, Kind) else self._made_kind(text, ())

        return named

    def _made_kind(self, name: str, arguments: tuple[Any, ...]) -> Kind:
        """A type by its name, or what that is another name for."""
        if name == "conditional_t" and len(arguments) == 3:
            if isinstance(arguments[0], Opaque):
                return Kind(name)  # one of two, and nobody knows which
            chosen = arguments[1] if truth(arguments[0]) else arguments[2]
            return chosen if isinstance(chosen, Kind) else Kind(name)
        if name in self.unit.aliases and name not in self.unit.structs:
            names, node = self.unit.aliases[name]
            return self.kind(node)(Frame(dict(zip(names, arguments, strict=False))))
        return Kind(name, arguments)

    def template_arguments(self, node: Node) -> list[Expression]:
        """What stands between ``<`` and ``>``."""
        arguments = node.child_by_field_name("arguments")
        return [self._template_argument(a) for a in (arguments.named_children if arguments else ())]

    def _template_argument(self, node: Node) -> Expression:
        if node.type != "type_descriptor":
            return self.expression(node)
        inner, declarator = (node.child_by_field_name(n) for n in ("type", "declarator"))
        if inner is None:
            return self.puzzle(f"can't read '{text_of(node)}'", node)
        if declarator is not None:
            # A call looks like the type of a function; what has another declarator is a type
            is_call = declarator.type == "abstract_function_declarator"
            return self.expression(as_expression(node)) if is_call else self.kind(node)
        if inner.type == "qualified_identifier":
            return self.qualified(inner)
        if inner.type != "type_identifier":
            return self.kind(inner)
        name = text_of(inner)
        if name in self.unit.structs or name in self.unit.aliases:
            return self.kind(inner)
        return self.identifier(inner)

    def _struct(self, kind: Kind) -> Struct:
        """The definition that serves a type: a specialisation before the general one."""
        if kind not in self._definitions:
            self._definitions[kind] = self._find_struct(kind)
        return self._definitions[kind]

    def _find_struct(self, kind: Kind) -> Struct:
        found = self.unit.structs.get(kind.name, ())
        general = [struct for struct in found if struct.specialised is None]
        arguments = self._completed(kind, general[0].template) if general else kind.arguments
        for struct in found:
            if struct.specialised is None:
                continue
            stated = [self._template_argument(a)(Frame()) for a in struct.specialised]
            pairs = list(zip(stated, arguments, strict=False))
            if len(stated) == len(arguments) and all(
                one == other for one, other in pairs if not isinstance(one, Opaque)
            ):
                if struct.template:
                    raise NotUnderstoodError(f"{kind.name} is specialised in part")
                return struct
        if len(general) != 1:
            raise NotUnderstoodError(f"{kind.name} has no definition for {kind.arguments}")
        return general[0]

    def _completed(
        self, kind: Kind, template: Sequence[tuple[str, Node | None]]
    ) -> tuple[Any, ...]:
        """A template's arguments, with the defaults of those that aren't given."""
        made = list(kind.arguments)
        names = Frame(dict(zip((name for name, _ in template), made, strict=False)))
        for name, default in template[len(made) :]:
            if default is None:
                break
            names.names[name] = self._template_argument(default)(names)
            made.append(names.names[name])
        return tuple(made)

    def member(self, kind: Kind, name: str, text: str) -> Any:
        """A constant, type or function of a struct, or of what it is derived from.

        Raises:
            NotUnderstoodError: the struct, or the constant's value, can't be told.
        """
        key = (kind, name)
        if key not in self._members:
            self._members[key] = Opaque(text)  # should it be made of itself
            try:
                self._members[key] = self._find_member(kind, name, text)
            except NotUnderstoodError:
                del self._members[key]
                raise
        return self._members[key]

    def _find_member(self, kind: Kind, name: str, text: str) -> Any:
        if any(isinstance(a, Opaque) for a in kind.arguments):
            return Opaque(text)
        struct = self._struct(kind)
        given = self._completed(kind, struct.template)
        own = dict(zip((name for name, _ in struct.template), given, strict=False))
        frame = Frame(_Members(self, struct, kind, own))
        for item in struct.body.named_children:
            if name not in _member_names(item):
                continue
            if item.type == "alias_declaration":
                return self.kind(item.child_by_field_name("type") or item)(frame)
            if item.type == "function_definition":
                return self._bound(item, frame, text)
            value = item.child_by_field_name("default_value")
            return self.expression(value)(frame) if value is not None else Opaque(text)
        for base in struct.bases:
            made = self.kind(base)(frame)
            if made.name in self.unit.structs:
                found = self.member(made, name, text)
                if not isinstance(found, Opaque):
                    return found
        return Opaque(text)

    def _bound(self, node: Node, frame: Frame, text: str) -> Any:
        function, where = function_of(node, None), self.unit.where(node)
        if function is None:
            return Opaque(text)
        return lambda given: self.enter(function, given, None, where, frame)

    def fields(self, struct: Struct) -> list[tuple[str, str, Node | None]]:
        """Name, type and initial value of each field, in order."""
        if struct.body.id in self._fields:
            return self._fields[struct.body.id]
        found = self._fields[struct.body.id] = []
        for item in struct.body.named_children:
            if item.type != "field_declaration" or "static" in text_of(item).split():
                continue
            kind, value = (
                item.child_by_field_name("type"),
                item.child_by_field_name("default_value"),
            )
            for declared in item.children_by_field_name("declarator"):
                name = re.search(r"([A-Za-z_]\w*)$", text_of(declared))
                if name is not None:
                    found.append((name[1], text_of(kind) if kind is not None else "", value))
        return found

    def _aggregate(self, struct: Struct, values: Sequence[Any]) -> Object:
        fields = self.fields(struct)
        if len(values) > len(fields):
            raise NotUnderstoodError(f"{struct.name} has {len(fields)} fields, not {len(values)}")
        made = Object(struct.name, {})
        for at, (name, kind, initial) in enumerate(fields):
            if at < len(values):
                made.fields[name] = self.fits(copied(values[at]), kind)
            elif kind.split("::")[-1] in self.unit.structs:
                made.fields[name] = Opaque(f"{struct.name}.{name}")
            else:
                value = self.expression(initial)(Frame()) if initial is not None else 0
                made.fields[name] = self.fits(value, kind)
        return made

    def _construct(self, struct: Struct, values: Sequence[Any]) -> Object | None:
        """By the constructor with so many parameters; None where the struct has none at all."""
        found = False
        for item in struct.body.named_children:
            listed = [c for c in item.named_children if c.type == "field_initializer_list"]
            declarator = item.child_by_field_name("declarator")
            if item.type != "function_definition" or declarator is None or not listed:
                continue
            parameters = declarator.child_by_field_name("parameters")
            names = parameters.named_children if parameters is not None else []
            found = True
            if len(names) == len(values):
                frame = Frame({_declared(n): v for n, v in zip(names, values, strict=True)})
                made = Object(struct.name, {})
                for one in listed[0].named_children:
                    name, given = one.named_children[0], one.named_children[-1].named_children
                    made.fields[text_of(name)] = (
                        self.expression(given[0])(frame) if len(given) == 1 else Opaque(struct.name)
                    )
                return made
        if found:
            raise NotUnderstoodError(f"{struct.name} has no constructor of {len(values)} values")
        return None


class _Members(dict[str, Any]):
    """The members of a struct by bare name, as its own members see them."""

    def __init__(self, names: Names, struct: Struct, kind: Kind, template: dict[str, Any]) -> None:
        super().__init__(template)
        self._names, self._kind = names, kind
        self._known = {name for item in struct.body.named_children for name in _member_names(item)}
        self._derived = bool(struct.bases)

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name) or name in self._known:
            return True
        # Of a base: only what can be had of it
        return (
            self._derived
            and isinstance(name, str)
            and not isinstance(self._names.member(self._kind, name, name), Opaque)
        )

    def __missing__(self, name: str) -> Any:
        return self._names.member(self._kind, name, name)


def _member_names(item: Node) -> set[str]:
    """What a part of a struct's body declares, other than fields."""
    if item.type == "alias_declaration":
        return {text_of(item.child_by_field_name("name") or item)}
    if item.type == "function_definition":
        function = function_of(item, None)
        return {function.name} if function is not None else set()
    if item.type == "field_declaration" and "static" in text_of(item).split():
        return {text_of(d) for d in item.children_by_field_name("declarator")}
    return set()


def _declared(node: Node) -> str:
    declarator = node.child_by_field_name("declarator")
    return text_of(declarator) if declarator is not None else ""


def last_two(node: Node) -> tuple[Node | None, Node]:
    """The innermost scope, and the name in it."""
    scope, name = node.child_by_field_name("scope"), node.child_by_field_name("name")
    while name is not None and name.type == "qualified_identifier":
        scope, name = name.child_by_field_name("scope"), name.child_by_field_name("name")
    return scope, name if name is not None else node
