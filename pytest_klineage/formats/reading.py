"""Reads Python without executing it: constants, shapes, one call of a known function. Everything else is refused."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from pytest_klineage.formats.symbols import (
    CASTS,
    DTYPES,
    FUNCTIONS,
    LAYERS,
    METHODS,
    RANDOM,
    SAME,
    Applied,
    Dotted,
    Layer,
    NotStatic,
    Part,
    Tensor,
    Value,
)

Function: TypeAlias = ast.FunctionDef
Scope: TypeAlias = dict[str, Value]

LARGEST_TEXT = 1 << 20
"""Characters of a file that is read at all."""
LARGEST_NUMBER = 1 << 40
OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod,
}  # fmt: skip
HARMLESS = frozenset({"torch.no_grad", "torch.inference_mode"})
"""Decorators that change nothing about the result."""
SELF = "self."


class Reader:
    """The top level of one file: its imports, constants, functions and classes."""

    def __init__(self, text: str) -> None:
        self.tree = parsed(text)
        self.names: Scope = {}
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.trouble: NotStatic | None = None
        """A call at the top level: it runs before everything else, and is not followed."""
        for node in self.tree.body:
            self._take(node)

    def function(self, name: str, owner: str = "") -> Function:
        """A function of the file, or a method of one of its classes. Raises NotStatic when it is not there."""
        found = self.functions.get(name)
        if owner:
            body = self.classes[owner].body if owner in self.classes else []
            found = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)
        if found is None:
            raise NotStatic(0, f"{f'class {owner} with ' if owner else ''}a function {name} is not there")
        return found

    def called(self, function: Function, given: Sequence[Value], scope: Mapping[str, Value] | None = None) -> Value:
        """What a function returns for some arguments. Raises NotStatic. Attributes of self are in `scope` as well."""
        if self.trouble is not None:
            raise self.trouble
        return self._run(function, self._bound(function, given, scope or {}))

    def module_class(self, name: str, base: str) -> None:
        """Raise NotStatic unless a class is there, with that base alone and with plain methods alone."""
        node = self.classes.get(name)
        if node is None:
            raise NotStatic(0, f"a class {name} is not there")
        bases = [self.value(item, {}) for item in node.bases]
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        others = [item for item in node.body if item not in methods and not _says_nothing(item)]
        names = [method.name for method in methods]
        odd = [found for found in names if (found.startswith("__") and found != "__init__") or names.count(found) > 1]
        if bases != [Dotted(base)] or node.keywords or node.decorator_list or others or odd:
            what = odd[0] if odd else "its bases, decorators or attributes"
            raise NotStatic(node.lineno, f"class {name} is no plain module: {what}")

    def constructed(self, name: str, given: Sequence[Value]) -> Scope:
        """The attributes that a class's constructor sets: "self.conv" to its value. Raises NotStatic."""
        if not any(isinstance(node, ast.FunctionDef) and node.name == "__init__" for node in self.classes[name].body):
            return {}
        function = self.function("__init__", name)
        scope = self._bound(function, given, {})
        self._run(function, scope)
        return {key: value for key, value in scope.items() if key.startswith(SELF)}

    def _take(self, node: ast.stmt) -> None:
        """One statement of the top level. What cannot be followed makes the names unknown that it might change."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.names.pop(node.name, None)
            self.functions.pop(node.name, None)
            self.classes.pop(node.name, None)
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            else:
                self.classes[node.name] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.names[alias.asname or alias.name.partition(".")[0]] = Dotted(
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                self.names[alias.asname or alias.name] = Dotted(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            try:
                _assign(node, self.value(node.value, self.names), self.names)
            except NotStatic:
                self._forget(node)  # it is an error only where it is used
        elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            self.trouble = NotStatic(node.lineno, f"`{_short(node)}` may change what follows")
        elif not _is_main_guard(node):
            self._forget(node)

    def _forget(self, node: ast.stmt) -> None:
        for found in ast.walk(node):
            if isinstance(found, ast.Name) and (isinstance(found.ctx, ast.Store | ast.Del) or _is_target(node, found)):
                self.names.pop(found.id, None)
            elif isinstance(found, ast.FunctionDef | ast.ClassDef):
                self.functions.pop(found.name, None)
                self.classes.pop(found.name, None)
            elif isinstance(found, ast.Call) and not isinstance(node, ast.Assign | ast.AnnAssign):
                self.trouble = NotStatic(found.lineno, f"`{_short(found)}` may change what follows")

    def _bound(self, function: Function, given: Sequence[Value], outer: Mapping[str, Value]) -> Scope:
        """The scope of a call: arguments by name, defaults where none is given."""
        _check_decorators(function, self)
        arguments = [*function.args.posonlyargs, *function.args.args]
        names = [argument.arg for argument in arguments]
        scope: Scope = dict(outer)
        if names[:1] == ["self"]:
            names = names[1:]
        if len(given) > len(names) or function.args.vararg or function.args.kwarg or function.args.kwonlyargs:
            raise NotStatic(function.lineno, f"{function.name} takes {len(names)} arguments, {len(given)} are given")
        scope.update(zip(names, (_named(value, name) for value, name in zip(given, names, strict=False)), strict=False))
        first = len(names) - len(function.args.defaults)
        for place, name in enumerate(names[len(given) :], start=len(given)):
            if place < first:
                raise NotStatic(function.lineno, f"{function.name} also needs {name}")
            try:
                scope[name] = self.value(function.args.defaults[place - first], self.names)
            except NotStatic:
                continue  # it is an error only where it is used
        return scope

    def _run(self, function: Function, scope: Scope) -> Value:
        """Straight-line code only: assignments, and a return at the end."""
        for node in function.body:
            if isinstance(node, ast.Return):
                return self.value(node.value, scope) if node.value is not None else None
            if isinstance(node, ast.Assign | ast.AnnAssign):
                if node.value is not None:
                    _assign(node, self.value(node.value, scope), scope)
            elif not _says_nothing(node):
                raise NotStatic(node.lineno, f"{type(node).__name__} is not followed: `{_short(node)}`")
        return None

    def value(self, node: ast.expr, scope: Mapping[str, Value]) -> Value:
        """The value of an expression. Raises NotStatic."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return node.value  # type: ignore[return-value]  # the pattern says so
            case ast.Name():
                return self._name(node, scope)
            case ast.Attribute():
                return self._attribute(node, scope)
            case ast.Tuple() | ast.List():
                return tuple(self.value(item, scope) for item in node.elts)
            case ast.Dict(keys=keys) if all(isinstance(key, ast.Constant) for key in keys):
                pairs = zip(keys, node.values, strict=True)
                return {str(key.value): self.value(item, scope) for key, item in pairs if isinstance(key, ast.Constant)}
            case ast.UnaryOp(op=ast.USub()):
                number = self.value(node.operand, scope)
                if isinstance(number, int | float):
                    return -number
            case ast.BinOp():
                return self._operation(node, scope)
            case ast.Call():
                return self._call(node, scope)
            case _:
                pass
        raise NotStatic(node.lineno, f"not known without executing it: `{_short(node)}`")

    def _name(self, node: ast.Name, scope: Mapping[str, Value]) -> Value:
        if node.id in scope:
            return scope[node.id]
        if node.id in self.names:
            return self.names[node.id]
        raise NotStatic(node.lineno, f"{node.id} is not known without executing it")

    def _attribute(self, node: ast.Attribute, scope: Mapping[str, Value]) -> Value:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            if (key := f"{SELF}{node.attr}") in scope:
                return scope[key]
            raise NotStatic(node.lineno, f"self.{node.attr} is not known without executing it")
        owner = self.value(node.value, scope)
        if isinstance(owner, Dotted):
            return Dotted(f"{owner.name}.{node.attr}")
        if isinstance(owner, Tensor) and node.attr in ("T", "mT"):
            raise NotStatic(node.lineno, f"`{_short(node)}`: no operator here takes a transposed matrix")
        raise NotStatic(node.lineno, f"not known without executing it: `{_short(node)}`")

    def _operation(self, node: ast.BinOp, scope: Mapping[str, Value]) -> Value:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        if isinstance(node.op, ast.MatMult):
            return Applied("torch.matmul", {"input": left, "other": right})
        compute = OPERATIONS.get(type(node.op))
        if compute is None or not isinstance(left, int | float) or not isinstance(right, int | float):
            raise NotStatic(node.lineno, f"arithmetic on tensors, or too much of it: `{_short(node)}`")
        try:
            result = compute(left, right)
        except (ZeroDivisionError, OverflowError) as error:
            raise NotStatic(node.lineno, f"`{_short(node)}`: {error}") from error
        if abs(result) > LARGEST_NUMBER:
            raise NotStatic(node.lineno, f"`{_short(node)}` is too large")
        return result  # type: ignore[no-any-return]  # numbers in, a number out

    def _call(self, node: ast.Call, scope: Mapping[str, Value]) -> Value:
        positional = [self.value(item, scope) for item in node.args]
        named = {item.arg: self.value(item.value, scope) for item in node.keywords if item.arg}
        if len(named) < len(node.keywords):
            raise NotStatic(node.lineno, f"`**` is not followed: `{_short(node)}`")
        if isinstance(node.func, ast.Attribute) and not _is_self(node.func):
            owner = self.value(node.func.value, scope)
            if isinstance(owner, Tensor):
                return _method(node, owner, node.func.attr, positional, named)
            if isinstance(owner, Applied | Part):
                raise NotStatic(node.lineno, f"no operator here stands for what follows: `{_short(node)}`")
        function = self.value(node.func, scope)
        if isinstance(function, Layer) and len(positional) == 1 and not named:
            return Applied(function.kind, {"input": positional[0], "layer": function})
        if isinstance(function, Dotted):
            return _of_package(node, function.name, positional, named)
        raise NotStatic(node.lineno, f"a call that is not followed: `{_short(node)}`")


def parsed(text: str) -> ast.Module:
    """The syntax tree. Raises NotStatic for what is no Python, or too much of it."""
    if len(text) > LARGEST_TEXT:
        raise NotStatic(0, f"the file is longer than {LARGEST_TEXT} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escape sequences of somebody else
            return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise NotStatic(0, f"not valid Python: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise NotStatic(0, "nested too deeply") from error


def _of_package(node: ast.Call, name: str, positional: Sequence[Value], named: Mapping[str, Value]) -> Value:
    if name in RANDOM:
        return _random(node, positional, named)
    if name in FUNCTIONS:
        return Applied(name, _by_name(node, FUNCTIONS[name], positional, named))
    if name in LAYERS:
        return Layer(name, _by_name(node, LAYERS[name], positional, named))
    raise NotStatic(node.lineno, f"no operator here stands for {name}")


def _method(
    node: ast.Call, tensor: Tensor, name: str, positional: Sequence[Value], named: Mapping[str, Value]
) -> Value:
    if name in SAME:
        return tensor
    if name in CASTS and not positional and not named:
        return msgspec.structs.replace(tensor, dtype=CASTS[name])
    if name == "to":
        return _cast(node, tensor, [*positional, *named.values()])
    if name in METHODS:
        function = METHODS[name]
        return Applied(function, _by_name(node, FUNCTIONS[function], [tensor, *positional], named))
    if name in ("t", "transpose", "permute"):
        raise NotStatic(node.lineno, f"`{_short(node)}`: no operator here takes a transposed matrix")
    raise NotStatic(node.lineno, f"no operator here stands for `{_short(node)}`")


def _cast(node: ast.Call, tensor: Tensor, targets: Sequence[Value]) -> Tensor:
    """`.to(...)`: types are taken, devices are not our business."""
    for target in targets:
        if isinstance(target, Dotted):
            if target.name not in DTYPES:
                raise NotStatic(node.lineno, f"no operator here takes {target.name}")
            tensor = msgspec.structs.replace(tensor, dtype=DTYPES[target.name])
        elif not isinstance(target, str):
            raise NotStatic(node.lineno, f"not known without executing it: `{_short(node)}`")
    return tensor


def _random(node: ast.Call, positional: Sequence[Value], named: Mapping[str, Value]) -> Tensor:
    sizes = positional[0] if len(positional) == 1 and isinstance(positional[0], tuple) else tuple(positional)
    dtype = named.get("dtype")
    known = DTYPES.get(dtype.name) if isinstance(dtype, Dotted) else "fp32"
    shape = tuple(size for size in sizes if type(size) is int and size > 0)
    if known is None or (dtype is not None and not isinstance(dtype, Dotted)) or len(shape) != len(sizes) or not shape:
        raise NotStatic(node.lineno, f"not a tensor of a known shape and type: `{_short(node)}`")
    return Tensor("", shape, known)


def _by_name(
    node: ast.Call, names: Sequence[str], positional: Sequence[Value], named: Mapping[str, Value]
) -> dict[str, Value]:
    unknown = [name for name in named if name not in names]
    if len(positional) > len(names) or unknown:
        raise NotStatic(node.lineno, f"unknown arguments: `{_short(node)}`")
    return {**dict(zip(names, positional, strict=False)), **named}


def _assign(node: ast.Assign | ast.AnnAssign, value: Value, scope: Scope) -> None:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        _put(target, value, scope)


def _put(target: ast.expr, value: Value, scope: Scope) -> None:
    if isinstance(target, ast.Name):
        scope[target.id] = value
    elif isinstance(target, ast.Attribute) and _is_self(target):
        if isinstance(value, Layer):
            value = msgspec.structs.replace(value, attribute=target.attr)
        scope[f"{SELF}{target.attr}"] = value
    elif isinstance(target, ast.Tuple) and isinstance(value, Applied):
        for index, item in enumerate(target.elts):
            _put(item, Part(value, index), scope)
    elif isinstance(target, ast.Tuple) and isinstance(value, tuple) and len(target.elts) == len(value):
        for item, single in zip(target.elts, value, strict=True):
            _put(item, single, scope)
    else:
        raise NotStatic(target.lineno, f"an assignment that is not followed: `{_short(target)}`")


def _is_target(node: ast.stmt, name: ast.Name) -> bool:
    """Whether a name is the owner of what a statement assigns to, as in `torch.matmul = mine`."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(found is name for target in targets if target is not None for found in ast.walk(target))


def _is_main_guard(node: ast.stmt) -> bool:
    """`if __name__ == "__main__":`, which an import passes over."""
    return isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ ==") and not node.orelse


def _named(value: Value, name: str) -> Value:
    return msgspec.structs.replace(value, name=name) if isinstance(value, Tensor) else value


def _check_decorators(function: Function, reader: Reader) -> None:
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        found = reader.value(target, {})
        if not isinstance(found, Dotted) or found.name not in HARMLESS:
            raise NotStatic(decorator.lineno, f"a decorator that is not followed: `{_short(decorator)}`")


def _says_nothing(node: ast.stmt) -> bool:
    """A docstring, `pass`, or the call of the parent's constructor."""
    if isinstance(node, ast.Pass):
        return True
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    return _short(node).startswith("super(") and _short(node).endswith(".__init__()")


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _short(node: ast.AST, limit: int = 80) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
