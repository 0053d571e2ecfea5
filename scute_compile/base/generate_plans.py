"""Writes `transformers_plans.json` from the installed transformers: `python -m scute_compile.base.generate_plans`.

The sources of transformers are parsed and never imported. A configuration class states its plan and its defaults as
literals in `models/<folder>/configuration_*.py`; a model class states its tied weights in `modeling_*.py`.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from scute_compile.base.heads import is_output_head
from scute_compile.base.transformers_plan import CONFIG_FIELDS, DATA

_DEPTH = 8
"""The most levels of base classes that are followed, so that a cycle of classes ends."""


def read_transformers() -> dict[str, object]:
    """Return the content of the data file for the installed transformers.

    Raises:
        FileNotFoundError: when transformers is not installed.
    """
    plans: dict[str, dict[str, str]] = {}
    defaults: dict[str, dict[str, int]] = {}
    heads: dict[str, list[str]] = {}
    for folder in sorted(path for path in _models_folder().iterdir() if path.is_dir() and path.name != "auto"):
        tied = sorted(set(_tied_heads(folder)))
        for model_type, attributes in _architectures(folder):
            if plan := _plan(attributes.get("base_model_tp_plan")):
                plans.setdefault(model_type, plan)
            if numbers := {f: number for f in CONFIG_FIELDS if isinstance(number := attributes.get(f), int)}:
                defaults.setdefault(model_type, numbers)
            if tied and tied != ["lm_head"]:
                heads.setdefault(model_type, tied)
    return {
        "transformers": importlib.metadata.version("transformers"),
        "plans": dict(sorted(plans.items())),
        "defaults": dict(sorted(defaults.items())),
        "tied_heads": dict(sorted(heads.items())),
    }


def text_of(content: Mapping[str, object]) -> str:
    """Return the data file's text: one line per architecture."""
    parts = [f'"transformers": {json.dumps(content["transformers"])}']
    for name in ("plans", "defaults", "tied_heads"):
        table = content[name]
        assert isinstance(table, dict)  # noqa: S101 - narrows the type
        rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
        parts.append(f'"{name}": {{\n{rows}\n}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _models_folder() -> Path:
    spec = importlib.util.find_spec("transformers")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (folder := Path(location) / "models").is_dir():
            return folder
    raise FileNotFoundError("transformers is not installed")


def _architectures(folder: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield each model type of a folder with the class attributes of its configuration."""
    for path in sorted(folder.glob("configuration_*.py")):
        classes = _classes(path)
        for node in classes.values():
            model_type = _class_literals(node).get("model_type")
            if isinstance(model_type, str) and model_type:
                yield model_type, _with_bases(node, classes)


def _plan(found: object) -> dict[str, str]:
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(key, str) and isinstance(value, str)}


def _tied_heads(folder: Path) -> Iterator[str]:
    """Yield the output heads that the folder's model classes tie to another weight."""
    for path in sorted(folder.glob("modeling_*.py")):
        for node in _classes(path).values():
            tied = _class_literals(node).get("_tied_weights_keys")
            keys = tied if isinstance(tied, dict | list) else ()
            for key in keys:
                module, _, parameter = str(key).rpartition(".")
                if parameter == "weight" and is_output_head(module):
                    yield module


def _classes(path: Path) -> Mapping[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _with_bases(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], depth: int = 0) -> dict[str, object]:
    """Return the literals of a class and of its bases in the same file, those of the class first."""
    found: dict[str, object] = {}
    for parent in reversed(node.bases):
        if isinstance(parent, ast.Name) and parent.id in classes and depth < _DEPTH:
            found.update(_with_bases(classes[parent.id], classes, depth + 1))
    found.update(_class_literals(node))
    return found


def _class_literals(node: ast.ClassDef) -> dict[str, object]:
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
    """Return the literal defaults of `__init__`, where configuration classes of older releases state them."""
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


if __name__ == "__main__":
    DATA.write_text(text_of(read_transformers()), encoding="utf-8")
