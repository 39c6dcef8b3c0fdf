"""TensorFlow and Keras are imported inside functions, in few rooms; `lint-imports` holds the order of the rooms."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "autotune"
LIBRARIES = {"tensorflow", "keras", "tf_keras"}
ALLOWED = ("recipe/", "script/", "space/", "training/", "runtime/template.py", "report/export.py")
"""Where a function may import them; elsewhere nothing may."""


def imports_of_tensorflow(tree):
    """Yield each import of TensorFlow or Keras that runs, and whether it stands in a function."""
    waiting = [(tree, False)]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if {name.partition(".")[0] for name in names} & LIBRARIES:
            yield node, inside
        inside = inside or isinstance(node, ast.FunctionDef | ast.Lambda)
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_tensorflow_is_imported_inside_functions_of_few_rooms(path):
    allowed = str(path.relative_to(PACKAGE)).startswith(ALLOWED)
    for node, inside in imports_of_tensorflow(ast.parse(path.read_text())):
        assert inside, f"line {node.lineno}: imported with the module"
        assert allowed, f"line {node.lineno}: this room knows no TensorFlow"
