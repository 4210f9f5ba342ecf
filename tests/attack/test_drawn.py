"""The faults that are drawn by lot are programs, each different from the code by one change."""

from __future__ import annotations

import ast
import json

from attack.drawn_mutants import drawn
from attack.executed_lines import read_page
from attack.explained import EXPLAINED
from attack.one_change import changes

PYTHON = b"""\
def sums(x: int | None = None, y=(1, -2)) -> "str | None":
    total = f"{1 + 2}"  # \xe2\x88\x91, and 3 < 4
    if x is None and not y:
        return call(x, 2, key=True)
    total += [a * b for a in y if a <= 3]
    call(total)
    return total
"""
SCRIPT = b"""\
// a + b < 1
export const sum = (a, b) => a + b; // 1
if (a < b && !c) {
  text = "a + b";
  other.call(text, 12);
}
"""


def applied(data, change):
    return data[: change.start] + change.new + data[change.end :]


def test_every_change_of_python_is_another_program():
    found = list(changes("some.py", PYTHON))
    programs = {ast.dump(ast.parse(applied(PYTHON, one))) for one in found}
    assert len(programs) == len(found) == 24
    assert ast.dump(ast.parse(PYTHON)) not in programs
    for one in found:  # no annotation and no part of an f-string
        assert b"(x: int | None = None" in applied(PYTHON, one)
        assert b'-> "str | None"' in applied(PYTHON, one)
        assert one.line != 2 or one.new == b"pass"


def test_changes_of_a_script_leave_comments_and_strings_alone():
    lines = SCRIPT.decode().splitlines()
    found = [applied(SCRIPT, one).decode().splitlines() for one in changes("some.js", SCRIPT)]
    changed = [line for one in found for line, old in zip(one, lines, strict=True) if line != old]
    assert changed == [
        "export const sum = (a, b) => a - b; // 1",
        "if (a <= b && !c) {",
        "if (a < b || !c) {",
        "if (a < b && c) {",
        "if (!(a < b && !c)) {",
        "  ;",
        "  other.call(text, 13);",
        "  ;",
    ]


def test_places_stay_drawn_while_other_lines_change(tmp_path):
    def lot(data):
        (tmp_path / "some.py").write_bytes(data)
        lines = {"some.py": {str(n): ["test"] for n in range(1, data.count(b"\n") + 1)}}
        return [(one.before, one.new) for one in drawn(tmp_path, lines)]

    first = lot(PYTHON)
    assert len(first) == 7
    assert first == lot(b"\n\n" + PYTHON)
    less = lot(PYTHON.replace(b"    call(total)\n", b""))
    assert less == [one for one in first if "call(total)" not in one[0]]
    assert all(reason.strip() for reason in EXPLAINED.values())


def test_what_node_has_not_called_is_not_executed(tmp_path):
    folder = tmp_path / "src/regard/views/report"
    folder.mkdir(parents=True)
    text = "const a = 1;\n\nfunction never() {\n  return 2;\n}\n"
    (folder / "some.js").write_text(text)
    whole = {"startOffset": 0, "endOffset": len(text), "count": 1}
    never = {"startOffset": 14, "endOffset": len(text) - 1, "count": 0}
    script = {
        "url": (folder / "some.js").as_uri(),
        "functions": [{"ranges": [never]}, {"ranges": [whole]}],
    }
    (tmp_path / "coverage.json").write_text(json.dumps({"result": [script]}))
    assert read_page(tmp_path, tmp_path) == {"src/regard/views/report/some.js": {"1": []}}
