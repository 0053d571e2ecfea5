"""What the installed transformers says about an architecture, read without importing it.

Importing transformers imports torch, which takes seconds; planning needs a few class attributes of a configuration
class only. They are literals in `models/<folder>/configuration_*.py`, so they are parsed, never run.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

_NOTHING: Mapping[str, object] = MappingProxyType({})


def tp_plan(model_type: str) -> Mapping[str, str] | None:
    """Return `base_model_tp_plan` of the architecture: module pattern, relative to the base model, -> word.

    None when transformers is not installed, doesn't know the architecture, or has no plan for it.
    """
    plan = _class_attributes(model_type).get("base_model_tp_plan")
    if not isinstance(plan, dict) or not plan:
        return None
    return MappingProxyType({k: v for k, v in plan.items() if isinstance(k, str) and isinstance(v, str)})


def config_default(model_type: str, field: str) -> object | None:
    """Return the value that the architecture's configuration class gives to a field that a config.json leaves out.

    None when nothing says so, and when the default is None or no literal.
    """
    return _class_attributes(model_type).get(field)


@cache
def _class_attributes(model_type: str) -> Mapping[str, object]:
    # The type comes from a file: it becomes part of a path only when it is a plain word.
    if not re.fullmatch(r"[A-Za-z0-9_\-]+", model_type):
        return _NOTHING
    for path in _candidates(model_type):
        classes = _classes(path)
        for node in classes.values():
            if _own_literals(node).get("model_type") == model_type:
                return MappingProxyType(_with_bases(node, classes))
    return _NOTHING


def _candidates(model_type: str) -> Iterator[Path]:
    """Yield the files that may hold the class: folders of the same name first, then any that has the word."""
    models = _models_folder()
    if models is None:
        return
    words = model_type.replace("-", "_").split("_")
    likely = [models / "_".join(words[:n]) for n in range(len(words), 0, -1)]
    for folder in likely:
        yield from sorted(folder.glob("configuration_*.py"))
    needle = f'"{model_type}"'
    for path in sorted(models.glob("*/configuration_*.py")):
        if path.parent not in likely and path.parent.name != "auto" and needle in _text(path):
            yield path


@cache
def _models_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec("transformers")
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (folder := Path(location) / "models").is_dir():
            return folder
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


@cache
def _classes(path: Path) -> Mapping[str, ast.ClassDef]:
    try:
        tree = ast.parse(_text(path))
    except (SyntaxError, ValueError):
        return MappingProxyType({})
    return MappingProxyType({node.name: node for node in tree.body if isinstance(node, ast.ClassDef)})


def _with_bases(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], depth: int = 0) -> dict[str, object]:
    """Literals of a class and, below them, of its bases in the same file."""
    found: dict[str, object] = {}
    for parent in reversed(node.bases):
        if isinstance(parent, ast.Name) and parent.id in classes and depth < 8:
            found.update(_with_bases(classes[parent.id], classes, depth + 1))
    found.update(_own_literals(node))
    return found


def _own_literals(node: ast.ClassDef) -> dict[str, object]:
    found: dict[str, object] = {}
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            found.update(_keyword_defaults(statement.args))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            found.update(_literal(statement.target.id, statement.value))
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    found.update(_literal(target.id, statement.value))
    return found


def _keyword_defaults(arguments: ast.arguments) -> dict[str, object]:
    """Configuration classes of older releases give their defaults in `__init__`, not as fields."""
    found: dict[str, object] = {}
    defaults = arguments.defaults
    positional = arguments.args[-len(defaults) :] if defaults else []
    for argument, value in zip(positional, defaults, strict=True):
        found.update(_literal(argument.arg, value))
    for argument, keyword in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if keyword is not None:
            found.update(_literal(argument.arg, keyword))
    return found


def _literal(name: str, value: ast.expr) -> dict[str, object]:
    try:
        return {name: ast.literal_eval(value)}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return {}
