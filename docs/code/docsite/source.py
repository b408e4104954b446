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


def signature(root: Path, module: str, node: ast.FunctionDef) -> str:
    """`name(a: int, b: str = "x") -> float`, in the lines of its source."""
    lines = (root / file_of(root, module)).read_text(encoding="utf-8").splitlines()
    head = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
    return head.removeprefix("def ").partition(":  #")[0].rstrip(":")


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
