"""Files made to do harm: each is refused in one line, in bounded memory, and leaves nothing."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import tracemalloc
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.boundary.npz import MAX_BYTES, MAX_MEMBERS
from regard.boundary.parse import MAX_NUMBERS
from regard.boundary.toml_json import MAX_KEYS, MAX_TEXT_BYTES, parse
from regard.errors import ProblemError
from regard.problems.files import load_problem, problem_from_mapping, save_problem
from regard.problems.problem import Problem

# Far more than any of these files needs, far less than any of them asks for.
ENOUGH_BYTES = 100 * 2**20

READY = {"queries": [[1.0, 2.0]], "keys": [[1.0, 0.0], [0.0, 1.0]], "values": [[1.0], [2.0]]}
TOML = "queries = [[1, 2]]\nkeys = [[1, 0], [0, 1]]\nvalues = [[1], [2]]\n"
WEIGHTS = "[weights]\nW_q = [[1]]\nW_k = [[1]]\nW_v = [[1]]\n"


def refused(path, *says):
    """The one line that refuses a file; it names the file and says all of `says`."""
    before = sorted(os.listdir(path.parent)) if path.parent.is_dir() else None
    with pytest.raises(ProblemError) as caught:
        load_problem(path)
    message = str(caught.value)
    assert type(caught.value) is ProblemError
    assert is_inert(message)
    assert len(message) < 1000
    assert message.startswith(f"{path}: ")
    for said in says:
        assert said in message
    assert before is None or sorted(os.listdir(path.parent)) == before
    return message


def is_inert(message):
    """Whether nothing in it moves a cursor, hides, or turns the direction of the text."""
    obeyed = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    return not obeyed & {unicodedata.category(character) for character in message}


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# What is no file at all.


def test_a_missing_file(tmp_path):
    refused(tmp_path / "none.toml", "cannot be read: No such file or directory")
    refused(tmp_path / "none" / "p.npz", "cannot be read: No such file or directory")


@pytest.mark.parametrize("suffix", [".toml", ".json", ".npz"])
def test_a_directory(suffix, tmp_path):
    (tmp_path / f"p{suffix}").mkdir()
    refused(tmp_path / f"p{suffix}", "is a directory, not a file")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
@pytest.mark.parametrize("suffix", [".toml", ".npz"])
def test_a_named_pipe_without_a_writer_does_not_make_it_wait(suffix, tmp_path):
    os.mkfifo(tmp_path / f"p{suffix}")
    refused(tmp_path / f"p{suffix}", "is a named pipe, not a file")


def test_a_link_to_an_endless_device(tmp_path):
    (tmp_path / "p.toml").symlink_to("/dev/zero")
    refused(tmp_path / "p.toml", "is a device, not a file")


def test_links_in_a_circle(tmp_path):
    (tmp_path / "p.toml").symlink_to(tmp_path / "q.toml")
    (tmp_path / "q.toml").symlink_to(tmp_path / "p.toml")
    refused(tmp_path / "p.toml", "cannot be read: Too many levels of symbolic links")


@pytest.mark.skipif(getattr(os, "geteuid", int)() == 0, reason="the superuser may read every file")
def test_a_file_that_may_not_be_read(tmp_path):
    path = written(tmp_path, "p.toml", TOML)
    path.chmod(0)
    refused(path, "cannot be read: Permission denied")


def test_a_file_whose_reading_fails(tmp_path, monkeypatch):
    def fail(*given):
        raise OSError(5, "Input/output error")

    path = written(tmp_path, "p.npz", archive(queries=npy(np.ones(3))))
    monkeypatch.setattr(zipfile.ZipExtFile, "read", fail)
    refused(path, "cannot be read: Input/output error")


@pytest.mark.parametrize("path", ["", "a\0b.toml", 3, None, 2.5, "\ud800.toml", ["p.toml"]])
def test_what_is_no_file_name(path):
    for call in (load_problem, lambda path: save_problem(Problem(**READY), path)):
        with pytest.raises(ProblemError, match=r"^path must be a file name, not ") as caught:
            call(path)
        assert is_inert(str(caught.value))


def test_a_file_name_stays_inert_in_the_message(tmp_path):
    path = tmp_path / "\x1b]0;gone\x07\n\u202etac.toml"
    for call in (load_problem, lambda path: save_problem(Problem(**READY), path / "p.toml")):
        with pytest.raises(ProblemError) as caught:
            call(path)
        assert is_inert(str(caught.value))
        assert "\\x1b]0;gone\\x07\\x0a\\u202etac" in str(caught.value)


# Text.

DEEP_TEXTS = {
    "arrays.toml": "queries = " + "[" * 100_000,
    "closed-arrays.toml": "queries = " + "[" * 500 + "]" * 500,
    "tables.toml": "queries = " + "{a = " * 100_000,
    "table-headers.toml": "[a" + ".a" * 100_000 + "]",
    "dotted-key.toml": "a" + ".a" * 1_000_000 + " = 1",
    "quoted-dotted-key.toml": '"a"' + " . 'a'" * 200_000 + " = 1",
    "dotted-key-behind-strings.toml": (
        'title = \'\'\'\n\'\' "\'\'\'\nnote = """\\"""\\""""\nx' + ".x" * 100_000
    ),
    "arrays.json": "[" * 100_000,
    "closed-arrays.json": '{"queries": ' + "[" * 500 + "]" * 500 + "}",
    "objects.json": '{"a":' * 100_000,
}
# 33 levels pass both parsers, and must not pass what comes after them.
DEEP_TEXTS |= {
    "just-too-deep.toml": "queries = " + "[" * 33 + "]" * 33,
    "just-too-deep.json": '{"queries": ' + "[" * 33 + "]" * 33 + "}",
}


@pytest.mark.parametrize("name", DEEP_TEXTS)
def test_bottomless_text(name, tmp_path):
    message = refused(written(tmp_path, name, DEEP_TEXTS[name]))
    assert "deep" in message or "dotted key of more than 32 parts in line" in message


def numbered(key, size=MAX_TEXT_BYTES - 64):
    """As many of these, each with a number of its own, as a text may hold."""
    return "".join(key % number for number in range(size // len(key % 10**6)))


CROWDED_TEXTS = {
    "arrays-of-tables.toml": lambda: "[[a]]\n" * (MAX_TEXT_BYTES // 6),
    "tables.toml": lambda: numbered("[a%d]\n"),
    "indented-tables.toml": lambda: numbered("  [ a . b%d ] # c\n"),
    "deep-tables.toml": lambda: numbered("[a.b%d" + ".c" * 29 + "]\r\n"),
    "quoted-tables.toml": lambda: numbered("[['a' . \"b\\\\%d\"]]\n"),
    "keys.toml": lambda: numbered("a%d=1\n"),
    "dotted-keys.toml": lambda: numbered("a.b%d" + ".c" * 29 + " = 1\n"),
    "quoted-keys.toml": lambda: numbered("'%d' = 1\n"),
    "keys-of-an-inline-table.toml": lambda: "a = {" + numbered("a%d=1,") + "b=1}",
    "inline-tables.toml": lambda: "a = [" + "{a=1}," * (MAX_TEXT_BYTES // 8) + "]",
    "empty-inline-tables.toml": lambda: "a = [" + "{ }," * (MAX_TEXT_BYTES // 8) + "]",
    "keys.json": lambda: "{" + numbered('"a%d":1,') + '"b":1}',
    "the-same-key.json": lambda: "{" + '"a":1,' * (MAX_TEXT_BYTES // 8) + '"b":1}',
    "objects.json": lambda: '{"a":[' + '{"a" : 1},' * (MAX_TEXT_BYTES // 12) + "{}]}",
    "empty-objects.json": lambda: '{"a":[' + "{ }," * (MAX_TEXT_BYTES // 8) + "{}]}",
}


@pytest.mark.parametrize("name", CROWDED_TEXTS)
def test_a_text_of_nothing_but_keys_is_refused_before_it_is_parsed(name, tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr("tomllib.loads", lambda *_, **__: parsed.append(name))
    monkeypatch.setattr("json.loads", lambda *_, **__: parsed.append(name))
    path = written(tmp_path, name, CROWDED_TEXTS[name]())
    refused(path, f"text has more than {MAX_KEYS} keys and empty", "up to line ")
    assert not parsed


few_or_most_keys = pytest.mark.parametrize(
    "most", [500, pytest.param(MAX_KEYS, marks=pytest.mark.full)]
)


@few_or_most_keys
def test_what_only_looks_like_a_key_does_not_count(monkeypatch, most):
    monkeypatch.setattr("regard.boundary.toml_json.MAX_KEYS", most)
    rows = most + 1
    column = "a = [\n" + "  [1],\n" * rows + "  [1]\n]\n"
    before = "a = [[1]\n" + "  , # 1\n[1]\n" * rows + "]\n"
    text = 'a = """\n' + "[a]\na = 1\n{}\n" * rows + '"""\n'
    comments = "# [a]\n" * rows + "a = 1\n"
    for toml in (column, before, text, comments):
        assert list(parse(toml, "toml")) == ["a"]
    labels = json.dumps({"a": ['"a": {}, {"b": 1}', "\\"] * rows})
    assert len(parse(labels, "json")["a"]) == 2 * rows


@few_or_most_keys
def test_as_many_keys_as_may_be_read_can_be_written_and_no_more(tmp_path, monkeypatch, most):
    monkeypatch.setattr("regard.boundary.toml_json.MAX_KEYS", most)

    def problem(words):
        labels = tuple(map(str, range(words)))
        ones, square = np.ones((words, 1)), np.ones((1, 1))
        return Problem(query_labels=labels, embeddings=ones, W_q=square, W_k=square, W_v=square)

    for suffix in (".toml", ".json"):
        path = tmp_path / f"p{suffix}"
        save_problem(problem(most - 20), path)
        assert len(load_problem(path).query_labels) == most - 20
        with pytest.raises(ProblemError, match=f"keys and tables; text holds {most}"):
            save_problem(problem(most), path, force=True)


def test_unclosed_strings_do_not_take_quadratic_time(tmp_path):
    for number, text in enumerate(
        ('"""' + '\n\\"""' * 300_000, "'''" + "\n''" * 300_000, '"' * 1_000_001, "'" * 1_000_001)
    ):
        refused(written(tmp_path, f"{number}.toml", "title = " + text), "is not valid TOML")
    text = "{" * MAX_KEYS + '"' + '\\"' * 1_000_000
    refused(written(tmp_path, "p.json", text), "is not valid JSON")


@pytest.mark.parametrize(
    "digits", ["1" * 100_000, "0x" + "f" * 100_000, "1." + "1" * 100_000, "-" + "1_" * 50_000]
)
def test_endless_numbers(digits, tmp_path):
    refused(written(tmp_path, "p.toml", f"heads = {digits}"), "more than 1024 characters", "line 1")


def test_a_long_quoted_word_is_not_taken_for_an_endless_number(tmp_path):
    label = "1" * 5000
    path = written(tmp_path, "p.toml", TOML + f'tokens = ["{label}"] # {label}\n')
    assert load_problem(path).query_labels == (label,)


def test_endless_integers_in_json(tmp_path):
    path = written(tmp_path, "p.json", '{"heads": ' + "1" * 100_000 + "}")
    refused(path, "is not valid JSON: the number 1111", "has 100000 digits")


def test_an_integer_beyond_any_float(tmp_path):
    path = written(tmp_path, "p.toml", "queries = [[1" + "0" * 400 + "]]")
    refused(path, "queries at (0, 0) is an integer of 1329 bits, which a 64-bit float cannot hold")


def test_a_text_over_the_limit_is_not_even_read(tmp_path):
    path = tmp_path / "p.toml"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: a terabyte that takes no room
    refused(path, f"has {2**40} bytes; at most {MAX_TEXT_BYTES} are read")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x00\x01\x02\xff", "text is not UTF-8: byte 0xff at position 3"),
        (b"\x7fELF\x02\x01\x01\x00", "is not valid"),
        (TOML.encode("utf-16"), "text is UTF-16; save it as UTF-8"),
        (b'title = "\xed\xa0\x80"', "text is not UTF-8: byte 0xed at position 9"),
        (b"\x89PNG\r\n", "text is not UTF-8: byte 0x89 at position 0"),
    ],
)
def test_what_is_no_text(content, said, tmp_path):
    refused(written(tmp_path, "p.toml", content), said)
    refused(written(tmp_path, "p.json", content), said)


def test_half_a_surrogate_pair(tmp_path):
    path = written(tmp_path, "p.json", json.dumps(READY | {"title": "\ud800"}))
    refused(path, "title has", "half of a surrogate pair")


@pytest.mark.parametrize(
    "text",
    [
        'tokens = ["{0}", "{0}"]\n',
        "title = 1\n[row_notes]\n'{0}' = 1",
        "'{0}' = 1",
        "[options]\nsoftmax = '{0}'",
        "[options]\n'{0}' = 1",
        "[random]\n'{0}' = 1",
        "[expect]\n'{0}' = 1",
        "[expect.weights]\nvalue = '{0}'",
        "[[expect.weights]]\n'{0}' = 1",
        "format = '{0}'",
    ],
)
def test_what_a_message_quotes_is_inert_and_short(text, tmp_path):
    hostile = "<script>\u202e\u200b\u2028\u061c\ue000" + "x" * 5000
    message = refused(written(tmp_path, "p.toml", text.format(hostile) + "\n" + TOML))
    assert "x" * 50 not in message


@pytest.mark.parametrize("table", ["embeddings", "queries", "keys"])
def test_labels_are_inert_in_messages(table, tmp_path):
    text = f'[{table}]\n"\\u001b]0;gone\\u0007\\u202e" = [1]\n"cat" = [1, 2]'
    message = refused(written(tmp_path, "p.toml", text), f'{table}."cat" has 2 numbers but')
    assert "\\x1b]0;gone\\x07\\u202e" in message


def test_few_tokens_and_one_long_vector_cannot_fill_the_memory(tmp_path):
    tokens, vector = '"a", ' * 100_000, "1, " * 100_000
    text = f"tokens = [{tokens}]\n[embeddings]\na = [{vector}]\n{WEIGHTS}"
    path = written(tmp_path, "p.toml", text)
    refused(path, f"embeddings becomes a matrix of 100000 × 100000 numbers; at most {MAX_NUMBERS}")


def test_a_recipe_cannot_fill_the_memory(tmp_path):
    recipe = (
        '[random]\ngenerator = "legacy"\nseed = 0\ndistribution = "normal"\ndraw = ["X"]\n'
        "shapes = { X = [1000000000, 1000000000] }\n"
    )
    refused(
        written(tmp_path, "p.toml", recipe), f"random.shapes asks for {10**18} numbers in total"
    )


# fmt: off
KEYS = [
    "tokens", "embeddings", "weights", "W_q", "queries", "keys", "values", "options", "window",
    "segments", "random", "shapes", "draw", "expect", "weights", "value", "at", "row_notes",
]
# fmt: on
keys = st.text(max_size=5) | st.sampled_from(KEYS)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


@given(data=st.dictionaries(keys, json_values, max_size=4))
def test_any_mapping_is_a_problem_or_one_error(data):
    for whole in (data, READY | data):
        try:
            problem_from_mapping(whole, "here")
        except ProblemError as error:
            assert is_inert(str(error))  # noqa: PT017
            assert str(error).startswith("here: ")  # noqa: PT017


# Archives.


def npy(array=None, *, descr="<f8", shape=(2, 2), data=bytes(32), version=1, header=None):
    """The bytes of an NPY member, true ones of an array or any lie."""
    if array is not None:
        file = io.BytesIO()
        np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
        return file.getvalue()
    if header is None:
        header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}\n"
    header = header.encode("latin-1") if isinstance(header, str) else header
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


def archive(compression=zipfile.ZIP_STORED, **members):
    return archive_of(list(members.items()), compression)


def archive_of(members, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as packed:
        for name, content in members:
            info = zipfile.ZipInfo(name if "." in name else f"{name}.npy")
            info.compress_type = compression
            with packed.open(info, "w") as member:
                member.write(content)
    return file.getvalue()


def ready():
    return {name: npy(np.array(rows)) for name, rows in READY.items()}


def in_little_memory(path, *says):
    tracemalloc.start()
    try:
        refused(path, *says)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_less(peak, ENOUGH_BYTES)


def test_the_archive_that_the_others_are_made_of_is_right(tmp_path):
    path = written(tmp_path, "p.npz", archive(**ready()))
    np.testing.assert_array_equal(load_problem(path).keys, READY["keys"])


MEMBERS = {
    "pickled objects": (
        npy(descr="|O", shape=(1,), data=b"cos\nsystem\n(S'true'\ntR."),
        'queries has the dtype "|O"; only booleans, integers, floats',
    ),
    "a structure": (
        npy(descr=[("a", "<f8")], shape=(4,)),
        "queries is not a plain array of numbers, booleans or text",
    ),
    "a hidden structure": (npy(descr="f8,f8", shape=(2,)), 'queries has the dtype "f8,f8"'),
    "complex numbers": (npy(descr="<c16", shape=(2,)), 'queries has the dtype "<c16"'),
    "long floats": (npy(descr="<f16", shape=(2,)), 'queries has the dtype "<f16"'),
    "bytes": (npy(descr="|S8", shape=(4,)), 'queries has the dtype "|S8"'),
    "dates": (npy(descr="<M8[ns]", shape=(4,)), 'queries has the dtype "<M8[ns]"'),
    "raw memory": (npy(descr="|V8", shape=(4,)), 'queries has the dtype "|V8"'),
    "a huge shape": (
        npy(shape=(65536, 65536)),
        "queries has the shape (65536, 65536) of float64, 34359738368 bytes, but 32 bytes",
    ),
    "a shape beyond 64 bits": (
        npy(shape=(2**33, 2**33)),
        f"queries has the shape (8589934592, 8589934592) of float64, {2**69} bytes, but 32",
    ),
    "a shape that wraps to what is there": (npy(shape=(2**61, 2**3 + 1)), "but 32 bytes are there"),
    "a negative shape": (npy(shape=(-2, -2)), "queries is not a plain array"),
    "a huge empty shape": (npy(shape=(10**18, 0), data=b""), "queries is empty, shape (10000"),
    "text of no width": (npy(descr="<U0", shape=(10**15,), data=b""), "brings the archive to"),
    "many axes": (npy(shape=(1,) * 30, data=bytes(8)), "queries has 30 axes; at most 8"),
    "a small shape": (
        npy(shape=(1, 2)),
        "queries has the shape (1, 2) of float64, 16 bytes, but 32",
    ),
    "a long header": (npy(version=2, header=" " * 5000), "queries has a header of 5000 bytes"),
    "an endless header": (
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
        "queries has a header of 4294967295 bytes; at most 4096",
    ),
    "code for a header": (
        npy(header="{'descr': __import__('os'), 'fortran_order': False, 'shape': (2, 2)}"),
        "queries is not a plain array",
    ),
    "a header with a key too many": (
        npy(header="{'descr': '<f8', 'fortran_order': False, 'shape': (2, 2), 'x': 1}"),
        "queries is not a plain array",
    ),
    "a header without a shape": (
        npy(header="{'descr': '<f8', 'fortran_order': False}"),
        "queries is not a plain array",
    ),
    "a nested header": (npy(header="{" * 4000), "queries is not a plain array"),
    "no header": (b"\x93NUMPY\x01\x00", "queries is cut off: 0 bytes of 2 are there"),
    "no array": (b"hello, world", "queries is not an NPY array"),
    "nothing": (b"", "queries is cut off: 0 bytes of 8"),
    "a version to come": (npy(version=9, header=""), "queries is not an NPY array"),
    "neither true nor false": (
        npy(descr="|b1", shape=(2,), data=b"\x01\x02"),
        "queries has a boolean that is neither 0 nor 1",
    ),
    "no characters": (
        npy(descr="<U1", shape=(2,), data=b"\xff" * 8),
        "queries has a code point that is not a character",
    ),
    "a big integer": (npy(np.array([[2**53 + 1, 0]])), "queries at (0, 0) is 9007199254740993"),
}


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("what", MEMBERS)
def test_a_member_that_is(what, compression, tmp_path):
    content, said = MEMBERS[what]
    members = ready() | {"queries": content}
    in_little_memory(written(tmp_path, "p.npz", archive(compression, **members)), said)


@pytest.mark.parametrize(
    "name",
    [
        "../queries.npy",
        "/queries.npy",
        "a/queries.npy",
        "a\\queries.npy",
        "..npy",
        "queries.txt",
        "queries.npy.npy ",
        "C:queries.npy",
        "\x1b[31mqueries.npy",
        "keys\0.npy",
        "é.npy",
    ],
)
def test_a_member_whose_name_is_no_key(name, tmp_path):
    path = written(tmp_path, "p.npz", archive_of([(name, npy(np.ones(2)))]))
    refused(path)
    assert os.listdir(tmp_path) == ["p.npz"]
    assert not (tmp_path.parent / "queries.npy").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("W_q", "W_q is not a known key; did you mean weights.W_q?"),
        ("weights.W_Q", "weights.W_Q is not a known key; did you mean weights.W_q?"),
        ("queries.a", "queries.a has no place: queries is an array of shape (1, 2)"),
        ("random.shapes.X", "random.distribution is missing"),
        ("expect.weights.0.value", "expect.weights.0 is not a known key"),
        ("a..b", "a is not a known key"),
    ],
)
def test_a_member_that_belongs_nowhere(name, said, tmp_path):
    members = [*ready().items(), (f"{name}.npy", npy(np.ones((1, 2))))]
    refused(written(tmp_path, "p.npz", archive_of(members)), said)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_is_there_twice(tmp_path):
    members = [*ready().items(), ("queries", npy(np.zeros((1, 2))))]
    refused(
        written(tmp_path, "p.npz", archive_of(members)), "queries appears 2 times in the archive"
    )


def test_a_member_that_the_header_has_too(tmp_path):
    header = npy(np.array(json.dumps({"queries": [[1, 2]]})))
    path = written(tmp_path, "p.npz", archive(**ready(), problem=header))
    refused(path, "queries is both a member and a key of problem")


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (np.array("{"), "problem is not valid JSON"),
        (np.array("[" * 100_000), "problem is nested too deeply"),
        (np.array("[]"), "problem must be a JSON object, not a list of 0"),
        (np.array(3.0), "problem must be one string of JSON, not an array of float64"),
        (np.array(["{}", "{}"]), "problem must be one string of JSON"),
    ],
)
def test_an_archive_whose_header_is_wrong(header, said, tmp_path):
    refused(written(tmp_path, "p.npz", archive(**ready(), problem=npy(header))), said)


def test_more_members_than_any_problem_has(tmp_path):
    members = [(f"m{i}", b"") for i in range(MAX_MEMBERS + 1)]
    refused(
        written(tmp_path, "p.npz", archive_of(members)), f"archive has {MAX_MEMBERS + 1} members"
    )


def test_a_directory_of_endless_members_is_not_read(tmp_path):
    content = bytearray(archive(**ready()))
    content[-10:-6] = struct.pack("<I", 2**31)  # the size of the directory
    in_little_memory(written(tmp_path, "p.npz", bytes(content)), f"a directory of {2**31} bytes")


def test_an_archive_that_says_it_is_larger_than_archives_are(tmp_path):
    content = archive(**ready())
    record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 2**40, 2**40, 2**60, 0)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(content) - 22, 1)
    path = written(tmp_path, "p.npz", content[:-22] + record + locator + content[-22:])
    in_little_memory(path, "archive is of the ZIP64 kind")


def test_an_archive_that_grows_without_measure(tmp_path):
    shape = (2**12, 2**12)  # 128 MiB of zeros, which pack a thousandfold
    content = npy(shape=shape, data=bytes(8 * shape[0] * shape[1]))
    path = written(tmp_path, "p.npz", archive(zipfile.ZIP_DEFLATED, queries=content))
    in_little_memory(path, "archive unpacks from", "above 16777216 it may grow 200 times at most")


def test_an_archive_that_grows_more_than_it_says(tmp_path):
    content = npy(shape=(2**12, 2**12), data=bytes(8 * 2**24))
    packed = archive(zipfile.ZIP_DEFLATED, queries=content)
    declared = npy(shape=(1, 2), data=bytes(16))
    lie = packed.replace(struct.pack("<I", len(content)), struct.pack("<I", len(declared)))
    in_little_memory(written(tmp_path, "p.npz", lie), "queries.npy")


@pytest.mark.parametrize("more", [8, 800 * 2**20])
def test_an_archive_that_holds_less_than_it_says(more, tmp_path):
    content = npy(shape=(1, 2 + more // 8), data=bytes(16))
    packed = archive(queries=content)
    # Both sizes, so that only reading shows that the bytes are not there.
    lie = packed.replace(struct.pack("<I", len(content)), struct.pack("<I", len(content) + more))
    in_little_memory(written(tmp_path, "p.npz", lie))


def test_more_bytes_than_are_ever_unpacked(tmp_path):
    packed = archive(queries=npy(np.ones((1, 2))), keys=npy(np.ones((1, 2))))
    size = struct.pack("<I", len(npy(np.ones((1, 2)))))
    lie = packed.replace(size, struct.pack("<I", MAX_BYTES // 2 + 1))
    in_little_memory(
        written(tmp_path, "p.npz", lie), f"archive unpacks to {MAX_BYTES + 2} bytes; at most"
    )


def test_narrow_numbers_that_become_wide(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.boundary.npz.MAX_NUMBERS", 5)
    members = {"queries": npy(np.ones((1, 2))), "keys": npy(np.ones((2, 2), dtype="int8"))}
    path = written(tmp_path, "p.npz", archive(**members))
    refused(path, "keys brings the archive to 6 numbers; at most 5 are read")


def test_a_sparse_archive_over_the_limit(tmp_path):
    path = tmp_path / "p.npz"
    with path.open("wb") as file:
        file.truncate(2**40)
    refused(path, f"has {2**40} bytes; at most")


@pytest.mark.parametrize(
    ("offset", "value", "said"),
    [
        (6, 1, "queries is encrypted"),
        (8, 12, "queries is packed by method 12"),
        (8, 14, "queries is packed by method 14"),
        (8, 99, "queries is packed by method 99"),
    ],
)
def test_a_member_that_is_locked_or_packed_in_another_way(offset, value, said, tmp_path):
    content = bytearray(archive(queries=npy(np.ones((1, 2)))))
    content[offset] = value  # in front of the member, and in the directory
    content[content.index(b"PK\x01\x02") + offset + 2] = value
    refused(written(tmp_path, "p.npz", bytes(content)), said)


def test_a_member_with_other_bytes_than_its_checksum_says(tmp_path):
    content = archive(**ready())
    damaged = content.replace(np.float64(2.0).tobytes(), np.float64(3.0).tobytes(), 1)
    refused(written(tmp_path, "p.npz", damaged), "archive is damaged: Bad CRC-32 for file")


def test_text_for_an_archive_and_an_archive_for_text(tmp_path):
    refused(written(tmp_path, "p.npz", TOML * 10), "archive is not an NPZ file, or is cut off")
    refused(written(tmp_path, "q.npz", b""), "archive is not an NPZ file, or is cut off")
    refused(written(tmp_path, "r.npz", npy(np.ones(3))), "archive is not an NPZ file")
    refused(written(tmp_path, "p.toml", archive(**ready())), "text is not")


@pytest.fixture(params=[".toml", ".json", ".npz"])
def whole(request, tmp_path_factory):
    """A small problem file that is right, and its bytes."""
    path = tmp_path_factory.mktemp("whole") / f"p{request.param}"
    problem = Problem(**READY, title="pets", query_labels=("cat",), bias=[1.0, -np.inf])
    regard.save_problem(problem, path)
    return path, path.read_bytes()


def test_a_file_that_is_cut_off_anywhere(whole):
    path, content = whole
    endings = range(len(content)) if path.suffix != ".npz" else range(0, len(content), 7)
    for end in endings:
        path.write_bytes(content[:end])
        is_problem_or_one_error(path)


def test_a_file_with_bytes_changed_anywhere(whole):
    path, content = whole
    generator = random.Random(0)
    for _ in range(1500):
        changed = bytearray(content)
        for _ in range(generator.choice((1, 1, 2, 8))):
            changed[generator.randrange(len(changed))] = generator.choice(
                (0, 1, 0x22, 0x5B, 0x7F, 0x80, 0xFF, generator.randrange(256))
            )
        path.write_bytes(bytes(changed))
        is_problem_or_one_error(path)


@given(content=st.binary(max_size=200))
def test_any_bytes(content, tmp_path_factory):
    for suffix in (".toml", ".json", ".npz"):
        path = tmp_path_factory.getbasetemp() / f"any{suffix}"
        path.write_bytes(content)
        is_problem_or_one_error(path)


def is_problem_or_one_error(path: Path) -> None:
    try:
        load_problem(path)
    except ProblemError as error:
        assert is_inert(str(error))  # noqa: PT017
        assert str(error).startswith(f"{path}: ")  # noqa: PT017
