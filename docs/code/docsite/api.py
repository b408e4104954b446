"""reference/api.md: each public name of the package with its signature and docstring."""

import ast
import re
from pathlib import Path

from docsite.markdown import docstring, first_sentence, source_link
from docsite.source import Definition, definition, fields, file_of, signature

HEAD = """# Python API

What `import tailrl` offers. A name is loaded when it is first asked for, so that the import itself loads no torch.
The end of a tensor's name is its shape, one capital letter a dimension:
[the letters](../../CONTRIBUTING.md#names).
"""


def api_page(root: Path) -> str:
    """The page, in the order of the package's docstring."""
    import tailrl

    parts = [HEAD]
    for group, names in _groups(tailrl.__doc__ or "", list(tailrl._HOME)).items():
        parts.append(f"## {group}\n")
        parts += [_entry(root, tailrl._HOME[name], name) for name in names]
    return "\n".join(parts)


def _groups(text: str, names: list[str]) -> dict[str, list[str]]:
    """The public names by the headings of the package's docstring; those that it lacks come last, as Others."""
    found: dict[str, list[str]] = {}
    group, left = "", list(names)
    for line in text.splitlines():
        if heading := re.match(r"([A-Z]\w+)\s{2,}", line):
            group = heading[1]
        for word in re.findall(r"\w+", line[line.find("  ") :]) if group else []:
            if word in left:
                left.remove(word)
                found.setdefault(group, []).append(word)
    return found | ({"Others": left} if left else {})


def _entry(root: Path, module: str, name: str) -> str:
    home, node, text = definition(root, module, name)
    shown = docstring(text)
    return (
        f"### {name}\n\n{_code(root, home, node, name)}\n\n{shown}\n\n{_methods(node)}"
        f"Source: {source_link(file_of(root, home))}\n"
    )


def _code(root: Path, module: str, node: Definition, name: str) -> str:
    if isinstance(node, ast.FunctionDef):
        shown = signature(root, module, node)
    elif isinstance(node, ast.ClassDef):
        if any(ast.unparse(base) == "Settings" for base in node.bases):
            return f"A block of a study file: [its keys](study.md#{name.lower()})."
        bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
        inside = "".join(f"\n    {line}" if line else "\n" for line in fields(root, module, node).splitlines())
        shown = f"class {name}{bases}:{inside or ' ...'}"
    else:
        shown = ast.unparse(node)
    return f"```python\n{shown}\n```"


def _methods(node: Definition) -> str:
    """A class's public methods, each with its first sentence."""
    if not isinstance(node, ast.ClassDef):
        return ""
    own = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    lines = [f"- `{_short(one)}`: {first_sentence(ast.get_docstring(one) or '')}\n" for one in own]
    return "".join(lines) + ("\n" if lines else "")


def _short(node: ast.FunctionDef) -> str:
    """A method's name with its parameters, or the name alone of a property."""
    if any(ast.unparse(one) in ("property", "cached_property") for one in node.decorator_list):
        return node.name
    return f"{node.name}({', '.join(one.arg for one in node.args.args[1:])})"
