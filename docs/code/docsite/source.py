"""The package's source, read without importing it: definitions, signatures and docstrings. torch is not needed."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = "workflow/tailrl"

Definition = ast.FunctionDef | ast.ClassDef | ast.AnnAssign


class NotThereError(Exception):
    """A module does not define the name that is asked for."""


def file_of(root: Path, module: str) -> Path:
    """The file of a module such as `objective.loss`, relative to the repository."""
    path = Path(PACKAGE, *module.split("."))
    return path / "__init__.py" if (root / path).is_dir() else path.with_suffix(".py")


@cache
def tree(root: Path, module: str) -> ast.Module:
    """The parsed module."""
    return ast.parse((root / file_of(root, module)).read_text(encoding="utf-8"))


def definition(root: Path, module: str, name: str) -> tuple[str, Definition, str]:
    """Where a name is defined that the module has, its definition, and its docstring.

    Raises:
        NotThereError: the module neither defines the name nor imports it from the package.
    """
    body = tree(root, module).body
    for at, node in enumerate(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node, ast.get_docstring(node) or ""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return module, node, _text_below(body, at)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tailrl."):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(root, str(node.module).removeprefix("tailrl."), alias.name)
    raise NotThereError(f"tailrl.{module} has no {name}")


def _text_below(body: list[ast.stmt], at: int) -> str:
    """The docstring below a constant."""
    below = body[at + 1] if at + 1 < len(body) else None
    text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
    return text if isinstance(text, str) else ""


def signature(node: ast.FunctionDef, name: str = "") -> str:
    """`name(a: int, b: str = "x") -> float`, one parameter a line where it would be longer than 90 characters."""
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name or node.name}({', '.join(_each(node.args))}){returned}"
    if len(line) <= 90:
        return line
    return f"{name or node.name}(\n" + "".join(f"    {one},\n" for one in _each(node.args)) + f"){returned}"


def _each(arguments: ast.arguments) -> list[str]:
    """Each parameter with its annotation and default."""
    given = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*[None] * (len(given) - len(arguments.defaults)), *arguments.defaults]
    found = [_one(argument, default) for argument, default in zip(given, defaults, strict=True)]
    if arguments.vararg:
        found.append(f"*{_one(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        found.append("*")
    found += [_one(one, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [*found, f"**{_one(arguments.kwarg, None)}"] if arguments.kwarg else found


def _one(argument: ast.arg, default: ast.expr | None) -> str:
    typed = f"{argument.arg}: {ast.unparse(argument.annotation)}" if argument.annotation else argument.arg
    if default is None:
        return typed
    return f"{typed} = {ast.unparse(default)}" if argument.annotation else f"{typed}={ast.unparse(default)}"


def fields(root: Path, module: str, node: ast.ClassDef) -> str:
    """The source of a record's fields, with the comments beside them; empty where it has none."""
    own = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    if not own:
        return ""
    lines = (root / file_of(root, module)).read_text(encoding="utf-8").splitlines()
    start = own[0].lineno - 1
    while lines[start - 1].strip().startswith("#"):
        start -= 1
    return "\n".join(line[4:] for line in lines[start : own[-1].end_lineno])


def functions_of(root: Path, module: str, constant: str) -> dict[str, str]:
    """The docstrings of the functions that a dictionary of names holds, by name."""
    _, node, _ = definition(root, module, constant)
    held = node.value if isinstance(node, ast.AnnAssign) else None
    if not isinstance(held, ast.Dict):
        raise NotThereError(f"tailrl.{module}.{constant} is no dictionary")
    return {
        str(ast.literal_eval(key)): definition(root, module, value.id)[2]
        for key, value in zip(held.keys, held.values, strict=True)
        if key is not None and isinstance(value, ast.Name)
    }
