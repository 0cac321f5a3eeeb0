"""Write docs/api.md from the docstrings of the classes that programs import: python -m docs.api_page"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "api.md"
HEADING = """\
# Python classes

<!-- Written by python -m docs.api_page from the docstrings of the classes. -->

What a program imports, and what objects of yours implement. How they are used: [from Python](guides/python.md),
[episodes](guides/episodes.md), [games](guides/games.md). A reward function is a plain function in
[TRL's signature](guides/from_trl.md#reward-functions): `f(prompts, completions, **columns)` returns a list of numbers
or None. Callbacks have [these methods](guides/python.md#callbacks). What scripts of TRL use besides is in
[a table](guides/python.md#from-a-trl-script).
"""
CLASSES = {
    "A run from a program": {"colocated_grpo": ["Trainer", "Result", "RunState", "ConfigError", "RunError"]},
    "Tasks, episodes and rewards": {
        "colocated_grpo.environments": [
            "Task",
            "Episode",
            "Conversation",
            "AssistantMessage",
            "ContextExhausted",
            "AnswerError",
        ],
        "colocated_grpo.environments.base": ["Seekable"],
        "colocated_grpo.environments.rewards.scoring": ["NoReward"],
    },
    "Games": {"colocated_grpo.environments.turns.base": ["TurnEnvironment", "Turn", "Outcome", "Return"]},
}
"""By section: classes, and the module to import them from."""
INTERNAL = {"Conversation": {"__init__", "rollout"}, "RunState": {"requests", "show"}}
"""Members that the trainer alone uses."""


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """Return the text of docs/api.md."""
    blocks = [HEADING]
    for section, modules in CLASSES.items():
        blocks.append(f"## {section}\n")
        for module, names in modules.items():
            blocks += ["\n".join(class_lines(definition(module, name), module)) for name in names]
    return "\n".join(blocks)


def definition(module: str, name: str) -> ast.ClassDef:
    [node] = ast.parse(inspect.getsource(getattr(import_module(module), name))).body
    assert isinstance(node, ast.ClassDef)
    return node


def class_lines(node: ast.ClassDef, module: str) -> Iterator[str]:
    yield f"### {node.name}\n\n`from {module} import {node.name}`\n"
    yield documentation(node)
    for name, line, about in members(node):
        if name not in INTERNAL.get(node.name, ()):
            yield f"**`{line}`**\n"
            yield from [about] if about else []


def members(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the code and the documentation of the public attributes and methods of a class."""
    for part, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id[0] != "_":
            text = after.value if isinstance(after, ast.Expr) else None
            about = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
            yield part.target.id, f"{part.target.id}: {ast.unparse(part.annotation)}", cleaned(about)
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == "__init__":
            yield part.name, f"{node.name}({parameters(part)})", documentation(part)
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name[0] != "_":
            kind = "async " * isinstance(part, ast.AsyncFunctionDef)
            returned = ast.unparse(part.returns) if part.returns else "None"
            takes = f": {returned}" if part.decorator_list else f"({parameters(part)}) -> {returned}"
            yield part.name, f"{kind}{part.name}{takes}", documentation(part)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the parameters without self."""
    return ast.unparse(function.args).removeprefix("self").removeprefix(", ")


def documentation(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return cleaned(ast.get_docstring(node) or "")


def cleaned(text: str) -> str:
    return f"{inspect.cleandoc(text).replace('<', '&lt;')}\n" if text else ""


if __name__ == "__main__":
    sys.exit(main())
