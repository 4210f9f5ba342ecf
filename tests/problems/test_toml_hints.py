"""What people write who do not know TOML yet, and the hint that each gets."""

from __future__ import annotations

import re

import pytest

from regard.boundary.toml_hints import hint
from regard.errors import ProblemError
from regard.problems.files import parse_problem

MISTAKES = [
    ("causal = True", "write true and false in lower case"),
    ("causal = yes", "write true or false"),
    ("softmax = shifted # as usual", 'text needs quotes: "shifted"'),
    ("title = She likes coffee", 'text needs quotes: "She likes coffee"'),
    ("tokens = [she, likes]", 'text needs quotes: "she"'),
    ("title = 'It's'", "text with ' in it goes between double quotes"),
    ('title = "a "b" c"', 'within text, " is written \\"'),
    ('title = "She likes\nheads = 1', "the quotes are not closed on their line"),
    ("title = 'She likes", "the quotes are not closed"),
    ('title = """She likes', "the quotes are not closed"),
    ("title = “She likes”", 'text goes between straight quotes: "…"'),
    ('title = "C:\\data"', "write \\\\ for a backslash, or put the text between ' and '"),
    ('tokens = ["she" "likes"]', 'a comma is missing before "likes"'),
    ("queries = [[1.0 0.0]]", "a comma is missing before 0.0"),
    ("queries = [\n  [1.0]\n  [2.0]\n]", "a comma is missing between two rows"),
    ("queries = [1 0; 0 2]", "each row is a list of its own, as in [[1, 0], [0, 2]]"),
    (
        "queries = [[1.0, 0.0], [0.0, 2.0]\nkeys = [[1.0]]",
        "the list above is not closed: a ] is missing",
    ),
    ("queries = [[1.0, 0.0],\nkeys = [[1.0]]", "the list above is not closed: a ] is missing"),
    ("queries = [[1.0]\n\n[options]\nheads = 1", "the list above is not closed: a ] is missing"),
    ("queries = [[1.0, 0.0]", "a list is not closed: a ] is missing"),
    ("queries = [[1.0]]]", "there is one ] too many"),
    ("queries = [[1.0]]\n]", "there is one ] too many"),
    ("queries = [1.0,, 2.0]", "there is one comma too many"),
    ("queries = [(1.0, 0.0)]", "a list goes between [ and ]"),
    ("queries = 1.0, 0.0", "several values go between [ and ]"),
    ("queries = 1.0 0.0", "a key has one value; several go between [ and ], with commas"),
    ("queries = [[1.0], ...]", "write every number"),
    (
        "[[1.0, 0.0],\n [0.0, 2.0]]",
        "a list needs a key before it, as in queries = [[1, 0], [0, 2]]",
    ),
    ("- 1.0\n- 2.0", "a list goes between [ and ]"),
    ("[keys\na = [1.0]", "a ] is missing after the name of the table"),
    ("causal true", "write causal = true"),
    ("causal: true", "write = and not :"),
    ("weights:\n\tW_q: [[1.0]]", "a table begins with [weights]"),
    ("causal", "a line is key = value, or [table]"),
    ("= 1", "a line is key = value, or [table]"),
    ("heads == 2", "write one ="),
    ("queries =\n  [[1.0]]", "a value begins on the line of its key"),
    ("scale =", "a value begins on the line of its key"),
    ("heads = 1 scale = 2.0", "each key begins a line of its own"),
    ("scale = 1.0\nscale = 2.0", "scale is given twice; keep one of the two"),
    ("[keys]\na = [1.0]\n[keys]\nb = [2.0]", "keys is given twice; put all of it below one [keys]"),
    ("scale = -.5", "write -0.5"),
    ("scale = 5.", "write 5.0"),
    ("queries = [5., 1.0]", "write 5.0"),
    ("heads = 02", "a number does not begin with 0; write 2"),
    ("queries = [01, 2]", "a number does not begin with 0; write 1"),
    ("scale = 1/2", "TOML has numbers, not expressions; write the result"),
    ("queries = [1/2, 1.0]", "TOML has numbers, not expressions; write the result"),
    ("queries = np.eye(2)", "TOML has numbers, not expressions; write the result"),
    ("mask = None", "TOML has no None; leave the key out"),
    ("bias = [[NaN, -Infinity]]", "write nan, inf or -inf"),
    ("scale = −0.5", "a minus sign is written -"),
    ("// a comment", "a comment begins with #"),
    ("scale = 1.0 // a comment", "a comment begins with #"),
    ("scale = 1.0;", "a line ends without ;"),
    ("scale = 1.0,", "a line ends without a comma"),
    (
        "embeddings = {\n  she = [1.0]\n}",
        "a table between { and } is on one line; over several lines, begin it with [name]",
    ),
    ("embeddings = { she = [1.0], }", "a table between { and } ends without a comma"),
    ("embeddings = { she = [1.0] b = [2.0] }", "a comma or a } is missing"),
    ("[keys]\nthe cat = [1.0]", 'put the name between quotes: "the cat" ='),
    ("[keys]\ncafé = [1.0]", 'put the name between quotes: "café" ='),
    ("[keys]\néclair = [1.0]", 'put the name between quotes: "éclair" ='),
    ("[keys]\nit's = [1.0]", 'put the name between quotes: "it\'s" ='),
    ("[keys]\na.é = [1.0]", 'put the name between quotes: "é"'),
    ('{ "queries": [[1.0]] }', "this is JSON, whose files end in .json"),
]


@pytest.mark.parametrize(("text", "mend"), MISTAKES)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_mistake_in_toml_is_answered_with_its_mend(text: str, mend: str, end: str) -> None:
    with pytest.raises(ProblemError) as caught:
        parse_problem(text.replace("\n", end), "toml", "mine.toml")
    said = str(caught.value)
    assert said.startswith("mine.toml: text is not valid TOML: ")
    assert said.endswith(f"; {mend}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[values]\na = [1.0]\ncausal = true",
            "if causal is not a label here: it belongs below [o",
        ),
        (
            "[values]\na = [1.0]\nheads = 2",
            "if heads is not a label here: keys outside a table come",
        ),
        ('[options]\ncausal = "true"', 'options.causal is "true"; write true or false, without'),
    ],
)
def test_valid_toml_in_which_a_key_is_lost_says_where_it_belongs(text: str, says: str) -> None:
    with pytest.raises(ProblemError, match=re.escape(says)):
        parse_problem(text, "toml")


def test_the_line_is_found_in_any_text_and_only_its_neighbourhood_is_read() -> None:
    filler = "# causal = True\n" * 1000
    with pytest.raises(
        ProblemError, match=r"line 1001, column 10\); write true and false in lower"
    ):
        parse_problem(f"{filler}causal = True", "toml")
    long = "a" * 10**6
    with pytest.raises(ProblemError) as caught:
        parse_problem(f'queries = [1.0, "{long}", {long}]', "toml")
    assert len(str(caught.value)) < 300


def test_what_is_not_known_gets_no_hint() -> None:
    assert not hint("x", "the number 1e999 is too large for a 64-bit float")
    assert not hint("x", "Something new (at line 1, column 1)")
