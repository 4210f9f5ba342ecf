"""Small changes of code, each of which mends a slip that people make: `<=` for `<`, `k` for `q`.

Must not know what the code computes, nor run it. No change leaves a step out: code that computes
something more, and is right, would then look like attention with a mistake.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher

from regard.diagnosis.reading.changed_text import Block, Change, Span, Syntax

# Each is likelier to be meant than those after it.
FIRST, SECOND, THIRD, LAST = range(4)

OPERATORS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("/",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("%",)),
    ast.Mod: ("%", ("//",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
    ast.Lt: ("<", ("<=", ">", ">=")),
    ast.LtE: ("<=", ("<", ">=", ">")),
    ast.Gt: (">", (">=", "<", "<=")),
    ast.GtE: (">=", (">", "<=", "<")),
    ast.Eq: ("==", ("!=", ">=", "<=")),
    ast.NotEq: ("!=", ("==",)),
}
TURNED = (ast.Sub, ast.Div, ast.MatMult, ast.FloorDiv, ast.Mod)  # operands whose order counts
INSTEAD = (
    ("repeat", "tile"),
    ("repeat_interleave", "repeat"),
    ("max", "min", "sum"),
    ("amax", "amin"),
    ("mean", "sum"),
    ("maximum", "minimum"),
    ("tril", "triu"),
    ("sin", "cos"),
    ("all", "any"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("logical_and", "logical_or"),
    ("view", "transpose"),
    ("exp", "log"),
    ("logsumexp", "max"),
)
MASKS = re.compile(
    "mask|pad|keep|valid|visible|allowed|causal|hidden|ignore|blocked", re.IGNORECASE
)
FACTORS = re.compile(
    "scale|alpha|corr|factor|temp|inv|norm|sqrt|decay|slope|cap$|^c$|rescale",
    re.IGNORECASE,
)
WIDTHS = re.compile("^d$|d_?k|d_?h|dim|width|size|hidden", re.IGNORECASE)
# A size of blocks: with others, as one key in each, a merge that is wrong may be right by chance.
OF_BLOCKS = re.compile("^(size|step|stride)$|block|chunk|tile|split", re.IGNORECASE)
MOST_NAMES, LIKELY_NAMES = 8, 3  # that are tried in the place of another one
MOST_AXES, MOST_LETTERS = 4, 40  # of an index with a new axis, of a formula of einsum
AUGMENTED = (("+=", "-="), ("-=", "+="), ("*=", "/="), ("/=", "*="), ("+=", "="))
Likely = tuple[int, Span]


def changes_of(blocks: Sequence[Block]) -> list[Change]:
    """Every small change of some code, the likeliest first."""
    found: dict[tuple[int, int, int, str], int] = {}
    for number, (_, text) in enumerate(blocks):
        own = _Changes(text)
        for likely, (start, end, new) in own.changes():
            key = (number, start, end, new)
            if text[start:end] != new:
                found[key] = min(likely, found.get(key, likely))
    return [Change(*one) for one in sorted(found, key=lambda one: (found[one], one))]


class _Changes(Syntax):
    """The changes of one top-level statement, each with how likely it is to be meant."""

    def changes(self) -> Iterator[Likely]:
        functions = [one for one in ast.walk(self.tree) if isinstance(one, ast.FunctionDef)]
        outer = [one for one in functions if not self.is_within_function(one)]
        for function in outer:
            for node in ast.walk(function):
                if not self.limits(node) and not self._is_of_blocks(node):
                    yield from self._of_node(node)
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "range":
                    stop = node.args[min(1, len(node.args) - 1)]
                    if not isinstance(stop, ast.Constant):  # a loop that ends a step early
                        yield SECOND, self.instead(stop, f"{self.code(stop)} + 1")
            yield from self._of_names(function)
            yield from self._of_unread(function)
            yield from self._of_factors(function)
            yield from self._of_order(function)
            yield from self._of_lengths(function)

    # --- one place ---------------------------------------------------------------------------

    def _of_node(self, node: ast.AST) -> Iterator[Likely]:
        match node:
            case ast.Constant():
                yield from self._of_constant(node)
            case ast.Compare():
                operands = itertools.pairwise([node.left, *node.comparators])
                for operator, pair in zip(node.ops, operands, strict=True):
                    yield from ((FIRST, one) for one in self._of_operator(operator, *pair))
            case ast.BinOp():
                yield from (
                    (SECOND, one) for one in self._of_operator(node.op, node.left, node.right)
                )
                if isinstance(node.op, TURNED):
                    yield THIRD, self._turned(node)
                yield from ((THIRD, one) for one in self._grouped(node))
                yield from ((FIRST, one) for one in self._of_other_term(node))
            case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
                if not isinstance(node.operand, ast.Constant):
                    yield SECOND, self.instead(node, self.code(node.operand))
            case ast.AugAssign():
                for old, new in AUGMENTED:
                    for span in self.between(node.target, node.value, old, new):
                        yield SECOND, span
            case ast.Assign(targets=[ast.Subscript() as target]):
                for span in self.between(target, node.value, "=", "+="):
                    yield SECOND, span
            case ast.Tuple(elts=[_, _, *_]):
                yield from ((SECOND, one) for one in self._with_other_signs(node))
            case ast.Subscript():
                yield from ((FIRST, one) for one in self._of_subscript(node))
            case ast.Call():
                yield from self._of_call(node)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            yield from self._negated(node)

    def _of_operator(self, operator: ast.AST, left: ast.AST, right: ast.AST) -> Iterator[Span]:
        old, others = OPERATORS.get(type(operator), ("", ()))
        for new in others:
            yield from self.between(left, right, old, new)

    def _turned(self, node: ast.BinOp) -> Span:
        """With the operands in the other order."""
        (_, middle), (later, _) = self.span(node.left), self.span(node.right)
        operator = re.sub(r"[()\s]", "", self.text[middle:later])
        return self.instead(node, f"({self.code(node.right)}) {operator} ({self.code(node.left)})")

    def _grouped(self, node: ast.BinOp) -> Iterator[Span]:
        """A product of a sum for the sum of a product, as where parentheses were forgotten."""
        sums, products = (ast.Add, ast.Sub), (ast.Mult, ast.Div)
        alone = isinstance(self.parents[node], ast.stmt)
        for outer, inner in ((sums, products), (products, sums)):
            if not isinstance(node.op, outer):
                continue
            own, left, right = OPERATORS[type(node.op)][0], node.left, node.right
            if isinstance(left, ast.BinOp) and isinstance(left.op, inner):
                one, two, three = map(self._operand, (left.left, left.right, right))
                text = f"{one} {OPERATORS[type(left.op)][0]} ({two} {own} {three})"
                yield self.instead(node, text if alone else f"({text})")
            if isinstance(right, ast.BinOp) and isinstance(right.op, inner):
                one, two, three = map(self._operand, (left, right.left, right.right))
                text = f"({one} {own} {two}) {OPERATORS[type(right.op)][0]} {three}"
                yield self.instead(node, text if alone else f"({text})")

    def _of_other_term(self, node: ast.BinOp) -> Iterator[Span]:
        """A sum of which the other term is multiplied: a * scale + b for a + scale * b."""
        if not isinstance(node.op, ast.Add):
            return
        for term, other in ((node.left, node.right), (node.right, node.left)):
            if isinstance(term, ast.BinOp) and isinstance(term.op, ast.Mult):
                for factor, rest in ((term.left, term.right), (term.right, term.left)):
                    if FACTORS.search(self.code(factor)):
                        yield self.instead(
                            node,
                            f"{self._operand(other)} * {self._operand(factor)} + {self.code(rest)}",
                        )

    def _operand(self, node: ast.AST) -> str:
        """Its text, in parentheses where it is more than a name, a number or a call."""
        simple = isinstance(
            node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant
        )
        return self.code(node) if simple else f"({self.code(node)})"

    def _with_other_signs(self, node: ast.Tuple) -> Iterator[Span]:
        """All numbers of a tuple negated, as the two shifts of an image."""
        operands = [one.operand for one in node.elts if isinstance(one, ast.UnaryOp)]
        start, end = self.span(node.elts[0])[0], self.span(node.elts[-1])[1]
        if len(operands) == len(node.elts):
            yield start, end, ", ".join(map(self.code, operands))
        elif isinstance(self.parents.get(node), ast.Call | ast.keyword) and all(
            isinstance(one, ast.Name | ast.Attribute) for one in node.elts
        ):
            yield start, end, ", ".join(f"-{self.code(one)}" for one in node.elts)

    def _of_constant(self, node: ast.Constant) -> Iterator[Likely]:
        value, whole = node.value, self._with_sign(node)
        within = self.parents[whole]
        if isinstance(within, ast.Slice) and within.step is whole:
            return  # without its sign a turned axis is left as it was
        call = self.parents.get(within, within) if isinstance(within, ast.keyword) else within
        name = self.code(call.func).split(".")[-1] if isinstance(call, ast.Call) else ""
        if name[:1].isupper():  # with other sizes an object has fewer of everything
            return
        sign = "" if whole is node else "-"
        is_operand = isinstance(self.parents[whole], ast.BinOp | ast.AugAssign)
        others: Iterable[str] = ()
        if isinstance(value, bool):
            others = (str(not value),)
        elif isinstance(value, int) and value < 10:
            own = int(f"{sign}{value}")
            numbers = {own + 1, own - 1, -own, 0, 1, 2, -1, -2}
            if is_operand:
                numbers -= {0, 1}  # these often leave out what is computed
            others = map(str, sorted(numbers - {own}))
        elif isinstance(value, float):
            others = (f"{-float(f'{sign}{value}')}", f"{sign}{2 * value}", f"{sign}{value / 2}")
        elif value in ("inf", "-inf"):
            others = (repr("-inf" if value == "inf" else "inf"),)
        elif isinstance(value, str) and "->" in value and len(value) <= MOST_LETTERS:
            others = map(repr, _other_sums(value))
        for one in others:
            text = f"({one})" if is_operand and one.startswith("-") else one
            yield THIRD if is_operand else FIRST, self.instead(whole, text)

    def _with_sign(self, node: ast.Constant) -> ast.AST:
        parent = self.parents[node]
        is_negative = isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub)
        return parent if is_negative else node

    def _of_subscript(self, node: ast.Subscript) -> Iterator[Span]:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(part, ast.Slice) and part.step is None:
                bounds = (part.lower, part.upper)
                lower, upper = ("" if one is None else self.code(one) for one in bounds)
                others = [f"{upper}:{lower}"] if lower or upper else []
                others += ["1:"] if (lower, upper) == ("", "-1") else []
                others += [":-1"] if (lower, upper) == ("1", "") else []
                for more in ("+ 1", "- 1"):
                    others += [f"{lower} {more}:{upper}"] if lower.isidentifier() else []
                    others += [f"{lower}:{upper} {more}"] if upper.isidentifier() else []
                yield from (self.instead(part, one) for one in others)
        is_new = [isinstance(one, ast.Constant) and one.value is None for one in parts]
        if any(is_new) and len(parts) <= MOST_AXES:
            for one, other in itertools.combinations(range(len(parts)), 2):
                if is_new[one] != is_new[other]:
                    yield self.exchanged(parts[one], parts[other])

    def _of_call(self, node: ast.Call) -> Iterator[Likely]:
        end = self.span(node.func)[1]
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        for group in INSTEAD:
            for other in group if name in group else ():
                yield SECOND, (end - len(name), end, other)
        for pair in itertools.combinations(node.args, 2):
            if name != "where" or not _is_number(pair[1]) or pair[0] is not node.args[0]:
                yield SECOND, self.exchanged(*pair)
        if name in ("reshape", "view") and isinstance(node.func, ast.Attribute):
            yield SECOND, self.instead(node, f"{self.code(node.func.value)}.swapaxes(-1, -2)")

    def _negated(self, node: ast.Name | ast.Attribute | ast.Subscript) -> Iterator[Likely]:
        """A mask with True for what was False."""
        base: ast.AST = node
        while isinstance(base, ast.Subscript):
            base = base.value
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        is_operand = isinstance(self.parents[node], ast.Call | ast.BinOp)
        if isinstance(node.ctx, ast.Load) and MASKS.search(name) and is_operand:
            yield SECOND, self.instead(node, f"(~{self.code(node)})")

    # --- a whole function ----------------------------------------------------------------------

    def _of_names(self, function: ast.FunctionDef) -> Iterator[Likely]:
        """One name in the place of another, unless fewer names are then of use."""
        names = [one for one in ast.walk(function) if isinstance(one, ast.Name)]
        own = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        own |= {one.id for one in names if not isinstance(one.ctx, ast.Load)}
        own -= {"self", "cls"}
        read = [one for one in names if isinstance(one.ctx, ast.Load) and one.id in own]
        read = [one for one in read if not (self._is_of_blocks(one) or self._is_kept(one))]
        reads = Counter(one.id for one in read)
        sizes = self._sizes(function)

        def others(name: str, count: int) -> list[str]:
            """The likeliest names in the place of this one, read so often here."""
            free = reads[name] > count
            found = [one for one in own if one != name and (free or not reads[one])]
            found = [one for one in found if one not in sizes or name in sizes]
            found.sort(key=lambda one: (-SequenceMatcher(None, name, one).ratio(), one))
            return found[:MOST_NAMES]

        for node in read:
            parent = self.parents[node]
            if not (isinstance(parent, ast.Call) and parent.func is node):
                for place, other in enumerate(others(node.id, 1)):
                    yield SECOND if place < LIKELY_NAMES else LAST, self.instead(node, other)
        for statement in ast.walk(function):
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.stmt) and isinstance(value, ast.expr):
                inside = set(ast.walk(value))
                here = Counter(one.id for one in read if one in inside)
                for name, count in here.items():
                    places = [self.span(one) for one in read if one in inside and one.id == name]
                    for other in others(name, count) if count > 1 else ():
                        yield SECOND, self._renamed(self.span(value), sorted(places), other)

    def _is_kept(self, node: ast.AST) -> bool:
        """Whether a statement only keeps what it gets in an object: self.size = size."""
        kept = self.parents[node]
        return isinstance(kept, ast.Assign) and isinstance(kept.targets[0], ast.Attribute)

    def _is_of_blocks(self, node: ast.AST) -> bool:
        """Whether a node makes the size of blocks."""
        while not isinstance(node, ast.stmt) and node in self.parents:
            node = self.parents[node]
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = (getattr(part, "id", "") for one in targets for part in ast.walk(one))
        return any(OF_BLOCKS.search(name) is not None for name in names)

    def _sizes(self, function: ast.FunctionDef) -> set[str]:
        """Names of lengths, as b, n, d = x.shape gives them: none is meant where an array is."""
        found = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and re.search(
                r"\.(shape|size\(\))$", self.code(node.value)
            ):
                names = (one for target in node.targets for one in ast.walk(target))
                found |= {one.id for one in names if isinstance(one, ast.Name)}
        return found

    def _renamed(self, whole: tuple[int, int], places: list[tuple[int, int]], name: str) -> Span:
        """A part of the text with another name in all of these places."""
        text, at = "", whole[0]
        for start, end in places:
            text += self.text[at:start] + name
            at = end
        return *whole, text + self.text[at : whole[1]]

    def _of_unread(self, function: ast.FunctionDef) -> Iterator[Likely]:
        """What a name that nothing reads was meant for: it is added, or multiplies."""
        names = [one for one in ast.walk(function) if isinstance(one, ast.Name)]
        known = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        known |= {one.id for one in names if isinstance(one.ctx, ast.Store)}
        unread = known - {one.id for one in names if isinstance(one.ctx, ast.Load)} - {"self", "_"}
        returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
        for value, name in itertools.product(returned, sorted(unread)):
            if value is not None and not isinstance(value, ast.Tuple):
                for operator in "+*-/":
                    yield SECOND, self.instead(value, f"({self.code(value)}) {operator} {name}")

    def _of_factors(self, function: ast.FunctionDef) -> Iterator[Likely]:
        """A factor that was forgotten, a square, a root."""
        nodes = [*ast.walk(function)]
        known = {self.code(one) for one in nodes if isinstance(one, ast.Name | ast.Attribute)}
        known |= {one.arg for one in nodes if isinstance(one, ast.arg)}
        factors = sorted(one for one in known if FACTORS.search(one.rpartition(".")[2]))
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AugAssign | ast.Return) and node.value:
                several = isinstance(node.value, ast.Tuple) and isinstance(node, ast.Return)
                for value in node.value.elts if several else [node.value]:  # type: ignore[attr-defined]
                    here = {self.code(one) for one in ast.walk(value) if isinstance(one, ast.expr)}
                    for factor, operator in itertools.product(factors, "*/"):
                        if factor not in here and not isinstance(value, ast.Constant | ast.Tuple):
                            text = f"({self.code(value)}) {operator} {factor}"
                            yield THIRD, self.instead(value, text)
            parent = self.parents.get(node)
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(parent, ast.BinOp):
                own = self.code(node)
                if WIDTHS.search(own.rpartition(".")[2]):
                    yield THIRD, self.instead(node, f"{own} ** 0.5")
                if isinstance(parent.op, ast.Add | ast.Sub) and not OF_BLOCKS.search(own):
                    yield THIRD, self.instead(node, f"{own} ** 2")

    def _of_order(self, function: ast.FunctionDef) -> Iterator[Likely]:
        """Two statements, one after the other, in the other order."""
        simple = (ast.Assign, ast.AugAssign, ast.Expr, ast.If)
        for node in ast.walk(function):
            body = getattr(node, "body", None)
            body = body if isinstance(body, list) else []
            loops = isinstance(node, ast.For | ast.While)
            for place, (one, other) in enumerate(itertools.pairwise(body)):
                both = isinstance(one, simple) and isinstance(other, simple)
                if both and (loops or _reads(body[place + 2 :], one)):  # or it has no effect
                    yield THIRD, self.exchanged(one, other)

    def _of_lengths(self, function: ast.FunctionDef) -> Iterator[Likely]:
        """Rows of length 1: torch's normalize takes axis 1 unless it is told another one."""
        for statement in ast.walk(function):
            value = getattr(statement, "value", None)
            if not (isinstance(statement, ast.stmt) and isinstance(value, ast.expr)):
                continue
            calls = [one for one in ast.walk(value) if isinstance(one, ast.Call)]
            alone = [
                self.span(one.args[0])[1]
                for one in calls
                if getattr(one.func, "attr", "") == "normalize" and len(one.args) == 1
                if not one.keywords
            ]
            if alone:
                start, end = self.span(value)
                edges = [start, *sorted(alone), end]
                parts = (self.text[one:other] for one, other in itertools.pairwise(edges))
                yield FIRST, (start, end, ", dim=-1".join(parts))


def _is_number(node: ast.AST) -> bool:
    """Whether it is a number, also one with a sign or a name such as np.inf: no condition."""
    own = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(own, ast.Constant) or getattr(own, "attr", "") in ("inf", "nan", "min")


def _reads(later: Sequence[ast.stmt], one: ast.stmt) -> bool:
    """Whether later statements read a name that this one gives a value; or it gives none."""
    names = [part for part in ast.walk(one) if isinstance(part, ast.Name)]
    given = {part.id for part in names if isinstance(part.ctx, ast.Store)}
    after = (part for own in later for part in ast.walk(own) if isinstance(part, ast.Name))
    return not given or any(part.id in given for part in after)


def _other_sums(formula: str) -> Iterator[str]:
    """Formulas of einsum with another letter in one place, or two letters of a part exchanged."""
    letters = sorted(set(filter(str.isalpha, formula)))
    places = [place for place, letter in enumerate(formula) if letter in letters]
    for place, letter in itertools.product(places, letters):
        yield formula[:place] + letter + formula[place + 1 :]
    for one, other in itertools.combinations(places, 2):
        if formula[one:other].isalpha():
            own = list(formula)
            own[one], own[other] = own[other], own[one]
            yield "".join(own)
