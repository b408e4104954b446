"""The rooms of the package and who imports whom, for Graphviz: `make house`.

The layers are those of import-linter's contract in pyproject.toml.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
PACKAGE = "tailrl"
LOOK = """bgcolor=transparent; nodesep=0.25; ranksep=0.3;
node [shape=box, style="rounded,filled", fillcolor=white, fontname=sans, fontsize=11];
edge [color=gray50, arrowsize=0.6];"""


def layers() -> list[list[str]]:
    """The rooms of each layer, from the top; a room in two layers counts in the upper one."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["type"] == "layers")
    rooms: dict[str, int] = {}
    for number, layer in enumerate(contract["layers"]):
        for name in re.split(r"[|:]", layer):
            rooms.setdefault(name.strip().partition(".")[0], number)
    return [[room for room, of in rooms.items() if of == number] for number in sorted(set(rooms.values()))]


def picture() -> Iterator[str]:
    """The lines of a digraph in DOT."""
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True)
    rooms = [room for layer in layers() for room in layer]
    for room in rooms:
        if graph.find_children(f"{PACKAGE}.{room}"):
            graph.squash_module(f"{PACKAGE}.{room}")
    yield f"digraph house {{ {LOOK}"
    for layer in layers():
        yield f"{{ rank=same; {'; '.join(layer)} }}"
    for number, layer in enumerate(layers()):
        below = {room for lower in layers()[number + 1 :] for room in lower}
        for room in layer:
            imported = {name.split(".")[1] for name in graph.find_modules_directly_imported_by(f"{PACKAGE}.{room}")
                        if name.count(".") == 1}  # fmt: skip
            yield from (f"{room} -> {other};" for other in sorted(imported & below))
    yield "}"


if __name__ == "__main__":
    print("\n".join(picture()))
