"""The bounded Jinja2 environment that chat templates from model files run in.

Owns the limits: a template can neither reach Python, nor loop on, nor build what doesn't fit.
Knows nothing of messages or models.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_STEPS = 1_000_000  # loop rounds, calls and filters of one rendering
MAX_SECONDS = 5.0
MAX_WIDTH = 1024  # of padding, indentation and the like
# What one rendering may build in all: so many times its input, and so much more.
BUILD_FACTOR = 16
BUILD_CHARS = 4 * 1024 * 1024

_WIDE_FORMAT = re.compile(r"\d{4,}|\*|\{[^{}]*\{")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class TemplateLimit(SecurityError):
    """A rendering went beyond its bounds; the message says which."""


class TemplateRefusal(Exception):
    """The template itself called ``raise_exception``; the message is what it said."""


class _Budget:
    """What one rendering may still do. Replaced before each."""

    def __init__(self, input_chars: int) -> None:
        self.steps = MAX_STEPS
        self.chars = BUILD_FACTOR * input_chars + BUILD_CHARS
        self.deadline_s = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateLimit(f"more than {MAX_STEPS} steps")
        if self.steps % 64 == 0 and time.monotonic() > self.deadline_s:
            raise TemplateLimit(f"more than {MAX_SECONDS:g} seconds")

    def build(self, chars: int) -> None:
        self.chars -= chars
        if self.chars < 0:
            raise TemplateLimit("it builds far more text than it is given")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict, bytes)) else 0


class _Rounds:
    """An iterable that charges each round; sized where the original is, as ``loop`` wants it."""

    def __init__(self, values: Any, budget: Callable[[], _Budget]) -> None:
        self._values = values
        self._budget = budget

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._budget().step()
            yield value


class _Charge(NodeTransformer):
    """Routes what the sandbox has no hook for through filters, which can't be shadowed."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_rounds", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *rest = node.nodes
        return nodes.Filter(first, "_concat", rest, [], None, None, lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice) or node.ctx != "load":
            return node
        return nodes.Filter(node, "_built", [], [], None, None, lineno=node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # printed, and so counted, as a value


class GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text in some templates."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Sandboxed and bounded. Not for several threads: one rendering at a time."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        self.budget = _Budget(0)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Nothing of a template may be computed while it is compiled.
            optimized=False,
            finalize=self._finalize(),
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        self.filters = {name: self._bounded(name, call) for name, call in self.filters.items()}
        self.filters["_rounds"] = lambda values: _Rounds(values, lambda: self.budget)
        self.filters["_concat"] = self._concat
        self.filters["_built"] = self._built
        del self.globals["lipsum"]

    def literals(self, source: str) -> list[str]:
        """All text that the template itself brings: its data and its string constants."""
        tree = super()._parse(source, None, None)
        data = [node.data for node in tree.find_all(nodes.TemplateData)]
        return data + [n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return cast(nodes.Template, _Charge().visit(tree))

    def add_filter(self, name: str, call: Callable[..., Any]) -> None:
        self.filters[name] = self._bounded(name, call)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self.budget.build(_size(left) + _size(right))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise TemplateLimit("a format is too wide")
        elif operator == "**" and (abs(right) > 64 or abs(left) > 2**64):
            raise TemplateLimit("a power is too large")
        return super().call_binop(context, operator, left, right)

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > 4096:
                raise TemplateLimit("a number is too large")
        elif isinstance(left, int) or isinstance(right, int):
            times = left if isinstance(left, int) else right
            self.budget.build((_size(left) + _size(right)) * max(times, 0))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.budget.step()
        name, owner = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if isinstance(owner, str):
            self._check_text(name, owner, args, kwargs)
        return self._built(super().call(context, obj, *args, **kwargs))

    def _check_text(
        self, name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse beforehand what would build a large text in a single operation."""
        values = [*args, *kwargs.values()]
        if name in _PADDING or name in {"indent", "wordwrap", "batch", "slice"}:
            width = max((abs(v) for v in values if isinstance(v, (int, float))), default=0)
            if width > MAX_WIDTH:
                raise TemplateLimit(f"a width of more than {MAX_WIDTH}")
            self.budget.build((text.count("\n") + text.count("\t") + 1) * int(width))
        elif name == "replace" and len(values) >= 2:
            old, new = str(values[0]), str(values[1])
            self.budget.build(text.count(old) * len(new))
        elif name == "format" and _WIDE_FORMAT.search(text):
            raise TemplateLimit("a format is too wide")
        elif name == "join" and values and isinstance(values[0], (list, tuple)):
            self.budget.build(len(values[0]) * len(text))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise TemplateLimit("a format is too wide")
        return wrapped

    def _bounded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        # Filters that take the context or environment get it as their first argument.
        skip = 1 if getattr(call, "jinja_pass_arg", None) is not None else 0

        @wraps(call)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            value, rest = (args[skip], args[skip + 1 :]) if len(args) > skip else (None, ())
            if name == "join" and isinstance(value, (list, tuple)):
                glue = str(rest[0]) if rest else str(kwargs.get("d", ""))
                self._check_text("join", glue, (value,), {})
                self.budget.build(sum(map(_size, value)))
            elif isinstance(value, str):
                self._check_text(name, value, rest, kwargs)
            return self._built(call(*args, **kwargs))

        return bounded

    def _built(self, value: Any) -> Any:
        self.budget.build(_size(value))
        return value

    def _concat(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        self.budget.build(sum(map(len, texts)))
        return "".join(texts)

    def _finalize(self) -> Callable[..., Any]:
        # Taking the context also keeps constants from being folded at compile time.
        @pass_context
        def finalize(context: Context, value: Any) -> Any:
            self.budget.build(_size(value))
            return value

        return finalize

    def allow(self, input_chars: int) -> None:
        """Give the next rendering its budget."""
        self.budget = _Budget(input_chars)
