"""A Jinja sandbox in which a template can neither reach Python nor run for ever.

Jinja's own sandbox guards attributes and mutation. What it leaves open is work: nested
loops, recursion, strings that double. Here every loop item and every call draws on one
budget, and every string that a template builds is measured.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_RENDERED_CHARS = 16_000_000
MAX_RENDER_SECONDS = 5.0
# Reading the clock costs more than a loop's step.
_STEPS_PER_CLOCK = 64
_MAX_POWER = 10_000

# "%0999999999d" and "{:>999999999}" build their width.
_WIDE_FORMAT = re.compile(r"\d{7,}|%[-+ #0]*\*")
# Filters whose arguments, not their text, decide how long the result is.
_SIZED_FILTERS = (
    *("batch", "center", "format", "indent", "join", "replace", "slice", "truncate"),
    "wordwrap",
)


class TemplateBudgetError(TemplateError):
    """A template does more work than writing a prompt can need."""


class TemplateBudget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_RENDER_SECONDS
        self._num_steps = 0

    def step(self) -> None:
        """Count one loop item or call.

        Raises:
            TemplateBudgetError: the rendering has taken too long.
        """
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_CLOCK:
            return
        if time.monotonic() > self._deadline:
            raise TemplateBudgetError(
                f"it runs for more than {MAX_RENDER_SECONDS:g} seconds"
            )

    def join(self, pieces: Iterable[str]) -> str:
        """Join the pieces of the output.

        Raises:
            TemplateBudgetError: they are too long together.
        """
        kept, num_chars = [], 0
        for piece in pieces:
            self.step()
            num_chars += len(piece)
            check_size(num_chars)
            kept.append(piece)
        return "".join(kept)


_budget: ContextVar[TemplateBudget] = ContextVar("template_budget")


@contextmanager
def template_budget() -> Iterator[TemplateBudget]:
    """Give the rendering inside the block a budget of its own."""
    budget = TemplateBudget()
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)


def check_size(num_chars: int) -> None:
    """Refuse a text that no prompt needs.

    Raises:
        TemplateBudgetError: it has more than MAX_RENDERED_CHARS characters.
    """
    if num_chars > MAX_RENDERED_CHARS:
        raise TemplateBudgetError(
            f"it writes more than {MAX_RENDERED_CHARS} characters"
        )


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox; templates run only inside `template_budget()`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["_count_steps"] = _count_steps
        self.filters["_measure"] = _measure
        for name in _SIZED_FILTERS:
            self.filters[name] = _measured_filter(name, self.filters[name])

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        template = super()._parse(source, name, filename)
        return _Instrument().visit(template)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse at once: an undefined value would print as nothing."""
        raise SecurityError(
            f"access to attribute {attribute!r:.80} of a {type(obj).__name__} is unsafe"
        )

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function for the template, counted and measured."""
        _budget.get().step()
        # The sandbox itself wraps str.format.
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_growth(method.__name__, (owner, *args), kwargs)
        return _measure(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` after a look at how large it will be."""
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_growth("format", (left,), {})
        return _measure(super().call_binop(context, operator, left, right))


class _Instrument(NodeTransformer):
    """Puts the counters into a parsed template, and refuses Python's inner names."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_count_steps")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(node, "_measure")

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Getattr:
        self.generic_visit(node)
        if node.attr.startswith("__"):
            raise SecurityError(f"access to attribute {node.attr!r:.80} is unsafe")
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr), "only a value can be filtered"
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _count_steps(values: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for value in values:
        budget.step()
        yield value


def _measure(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        check_size(len(value))
    return value


def _measured_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Look at a filter's arguments before it runs, and at its result after."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        is_marked = hasattr(function, "jinja_pass_arg")
        _check_growth(name, args[1:] if is_marked else args, kwargs)
        return _measure(function(*args, **kwargs))

    # Jinja's own marks on a function that takes its environment or context.
    measured.__dict__.update(vars(function))
    return measured


def _check_growth(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a text operation whose result would be far longer than its text.

    Args:
        name: of the method or filter.
        args: the text itself first.
    """
    for number in (*args, *kwargs.values()):
        if isinstance(number, int):
            check_size(number)
    text, *others = args
    if name in {"format", "format_map"}:
        if isinstance(text, str) and _WIDE_FORMAT.search(text):
            raise TemplateBudgetError("it pads a text to a width beyond any prompt")
    elif name == "replace" and len(others) >= 2:
        old, new = str(others[0]), str(others[1])
        check_size(str(text).count(old) * len(new))
    elif name == "join":
        values = next((v for v in args if isinstance(v, list | tuple)), ())
        check_size(sum(len(value) for value in values if isinstance(value, str)))


def _check_repetition(value: Any, times: Any) -> None:
    if isinstance(value, str | list | tuple) and isinstance(times, int):
        check_size(len(value) * times)


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(exponent, int | float) and abs(exponent) > _MAX_POWER:
        raise TemplateBudgetError("it computes a power beyond any prompt")
