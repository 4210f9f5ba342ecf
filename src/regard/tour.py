"""The tour of `regard tour`: what is said and computed at each stop, in order.

Owns the words between the tables; every number in them is computed while it is shown. Must not know
how a reader goes from one stop to the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from regard import api
from regard.bench.cases import Case
from regard.bench.command import checked_threads
from regard.bench.libraries import REGARD, peers
from regard.bench.measure import measure_cases
from regard.bench.tables import BUSY, number, reasons
from regard.bench.timing import Budget
from regard.boundary.arrays import Array
from regard.explanation.notation import format_number
from regard.problems.files import load_problem
from regard.views import story, terminal
from regard.views.diagnosis.terminal import print_parts, print_verdict
from regard.views.terminal_layout import ALARM, FAINT, STRONG, Layout

if TYPE_CHECKING:
    from rich.console import Console

DIGITS = 4
NUDGE = 0.001
CASE = Case("tour", 1, 8, 512, 512, 64, 8, 64)
BUDGET = Budget(seconds=0.2, rounds=3)


# --- 1: a sentence -------------------------------------------------------------------------------


def sentence(page: Layout) -> Iterator[None]:
    """The weights of a sentence of three words, and one number of the result."""
    explanation = api.explain(load_problem("she-likes-coffee"))
    words = explanation.steps["weights"].row_labels
    page.say(
        f"A sentence of {len(words)} words: {story.in_words(words)}. To a computer each word is a "
        "list of numbers, its vector. Attention gives each word a new vector, mixed from those of "
        "all the words."
    )
    page.gap()
    page.say(
        "In this table each row is a word that looks (a query), each column a word that it looks "
        "at (a key), and the number between them, a weight, says how much of the key goes into "
        "the mixture. The weight is larger where the vectors of the two words match better."
    )
    page.gap()
    terminal.print_explanation(explanation, page.console, ["weights"], digits=DIGITS)
    row = np.asarray(explanation.steps["weights"].value)[0]
    shares = [f"{share:.0%} from {word}" for word, share in zip(words, row, strict=True)]
    yield
    page.gap()
    page.say(
        f'Read along the first row: the new vector of "{words[0]}" takes {story.in_words(shares)}. '
        "Here is the first number of that vector, at position 0, because regard counts from 0:"
    )
    page.gap()
    terminal.print_derivation(explanation.why("output", words[0], 0), page.console, DIGITS)
    page.gap()
    page.say(
        "P are the weights of the row, V the values (what each word has to give), O the output. "
        "regard explains every number like this, back to the numbers that were given:"
    )
    page.line(f"  regard explain she-likes-coffee --why output {words[0]} 0", STRONG)
    yield


# --- 2: a mistake --------------------------------------------------------------------------------


def attention(q: Array, k: Array, v: Array) -> Any:
    """Attention, written by hand."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    weights = powers / powers.sum(-1, keepdims=True)
    return weights @ v


def broken(q: Array, k: Array, v: Array) -> Any:
    """The same with one mistake."""
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1]
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    weights = powers / powers.sum(-1, keepdims=True)
    return weights @ v


def mistake(page: Layout) -> Iterator[None]:
    """A function that is right, the same with one line changed, and what is found in each."""
    right, wrong = (inspect.getsource(one).splitlines()[2:] for one in (attention, broken))
    page.say(
        "Attention takes four lines of NumPy. q, k and v are tables of queries, keys and values, "
        "one row for each word, and q.shape[-1] is D, how many numbers a row has:"
    )
    page.gap()
    for line in right:
        page.line(line)
    page.gap()
    page.say("regard tries this function and says:")
    page.gap()
    print_verdict(api.diagnose(attention), page.console)
    page.gap()
    page.say("Now a mistake that is easy to make: the first line loses its square root.")
    page.gap()
    for before, after in zip(right, wrong, strict=True):
        changed = before != after
        page.line(f"  ▸ {after.strip()}" if changed else after, ALARM if changed else FAINT)
    yield
    page.gap()
    page.say(
        "This still runs, and each row of its weights still adds up to 1, so a quick look finds "
        "nothing. regard calls it on small inputs and compares the answers with those of "
        "attention and of every mistake that it knows:"
    )
    page.gap()
    found = api.diagnose(broken)
    print_verdict(found, page.console)
    print_parts(found, page.console)
    page.gap()
    page.say("Ask about a function of your own, in any file:")
    page.line("  regard diagnose my_attention.py", STRONG)
    yield


# --- 3: a gradient -------------------------------------------------------------------------------


def gradient(page: Layout) -> Iterator[None]:
    """The gradient of one given number, and the loss after that number is changed a little."""
    problem = load_problem("coffee-target")
    explanation = api.explain(problem)
    why = explanation.why("d_W_v", 0, 0)
    before = float(explanation.steps["loss"].value)
    page.say(
        "A model learns by changing its numbers a little, again and again. Take the sentence of "
        "the first stop, now with a target: the vectors that should come out. The loss is one "
        f"number that says how far the output is from them. Here it is {_short(before)}."
    )
    page.gap()
    page.say(
        "The values V are made of the word vectors X with a table of numbers, W_v, which a model "
        "learns. Does the loss rise or fall when the first number of W_v rises? Its gradient "
        "says (a d in front of a name means the gradient of it):"
    )
    page.gap()
    terminal.print_derivation(why, page.console, DIGITS)
    yield
    page.gap()
    W_v = np.array(problem.W_v)
    W_v[0, 0] += NUDGE
    after = float(api.explain(problem.replace(W_v=W_v, expect=())).steps["loss"].value)
    page.say(
        f"Try it: make that number {NUDGE} larger and compute everything again. The loss goes "
        f"from {before:.8f} to {after:.8f}, a change {_short((after - before) / NUDGE)} times "
        f"as large as {NUDGE}. The gradient said {_short(why.value)}; the smaller the step, the "
        "closer the two. So to make the loss smaller, this number should "
        f"{'fall' if why.value > 0 else 'rise'}, and learning does just that."
    )
    page.gap()
    page.say("All gradients of this sentence:")
    page.line("  regard explain coffee-target --gradients", STRONG)
    yield


# --- 4: this machine -----------------------------------------------------------------------------


def machine(page: Layout) -> Iterator[None]:
    """One call of attention timed here, beside NumPy and beside the peak of the machine."""
    heads, rows = CASE.H, CASE.L
    page.say(
        f"Last, speed. A text of {rows} words, read in {heads} ways at once ({heads} heads), needs "
        f"{heads} tables of {rows} × {rows} weights. regard and plain NumPy compute it now, on "
        "this machine; that takes some seconds."
    )
    page.gap()
    report = measure_cases([CASE], peers(["numpy"]), checked_threads(None), budget=BUDGET)
    (result,) = report.results
    names = {REGARD.name: "regard", "numpy": "NumPy"}
    for name, outcome in result.outcomes.items():
        if outcome.seconds is not None:
            page.line(f"  {names[name]:<7} {number(outcome.seconds * 1e3):>6} ms", STRONG)
    for reason in reasons(report):
        page.say(reason)
    page.gap()
    threads = report.machine["threads"]
    where = f"{report.machine['cpu']}, {threads} thread{'s' * (threads > 1)}"
    said = [f"Measured on {where}, after both answers were checked."]
    if result.ratio is not None:
        said.append(f"NumPy took {number(result.ratio)} times as long as regard.")
    if result.share is not None:
        said.append(
            "This machine can only multiply and add so fast; regard reached "
            f"{result.share:.0%} of that."
        )
    if (report.machine["load"] or 0) > BUSY:
        said.append("Other programs were running, so these times mean little.")
    page.say(" ".join(said))
    page.gap()
    page.say("More sizes and other libraries, in a minute or two:")
    page.line("  regard bench", STRONG)
    yield


def _short(value: float) -> str:
    return format_number(value, DIGITS)


# --- the end -------------------------------------------------------------------------------------

NEXT = {
    'regard explain --text "your own words"': "your own sentence, with random vectors",
    "regard explain she-likes-coffee --html coffee.html --open": "a page; a click opens a number",
    "regard examples": "more problems, smallest first",
    "regard mistakes": "all mistakes that regard can name",
    "regard --help": "all commands",
}


def reading(page: Layout) -> Iterator[None]:
    """What to do and to read next."""
    page.say("That was the tour. To go on, type one of these:")
    for command, words in NEXT.items():
        page.gap()
        page.line(f"  {command}", STRONG)
        page.say(words, indent=4)
    page.gap()
    page.say(
        "To read, in the repository: README.md shows regard on one page, site/pages/learn is a "
        "course in attention, docs/explanations.md says how to ask in Python, and docs/diagnose.md "
        "how mistakes are found."
    )
    yield


STOPS: Mapping[str, Callable[[Layout], Iterator[None]]] = {
    "1 of 4: a sentence": sentence,
    "2 of 4: a mistake": mistake,
    "3 of 4: a gradient": gradient,
    "4 of 4: this machine": machine,
    "What next": reading,
}


def walk(console: Console) -> Iterator[bool]:
    """Show one screen after the other, and say after each whether there are more."""
    page = Layout(console, DIGITS)
    for count, (title, stop) in enumerate(STOPS.items(), 1):
        page.section(title)
        for _ in stop(page):
            yield count < len(STOPS)
