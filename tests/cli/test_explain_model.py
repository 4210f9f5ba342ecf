"""`regard explain --model`: what is printed, what `--json` says, and what goes with what."""

from __future__ import annotations

import json

import numpy as np
import pytest

import regard
import tiny_bert
from commands import CliRunner
from regard.cli import app

pytestmark = [pytest.mark.needs("safetensors"), pytest.mark.needs("tokenizers")]

TEXT = "The cat sat on the mat."


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "COLORFGBG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tiny_bert.write(tmp_path / "bert")


def call(*words, columns=80):
    result = CliRunner().invoke(
        app, ["explain", *map(str, words)], env={"COLUMNS": str(columns), "NO_COLOR": "1"}
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def succeed(*words, **kind):
    result = call(*words, **kind)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refuse(*words):
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_without_a_layer_every_head_is_measured(folder, columns):
    printed = succeed("--model", folder, "--text", TEXT, columns=columns)
    overview = regard.models.load(folder).overview(TEXT)
    for name, values in overview.measures.items():
        assert f"\n{name}\n" in printed
        for row, numbers in enumerate(values):
            line = f"  {row} │ " + "  ".join(f"{number:.2f}" for number in numbers)
            assert f"{line} \n" in printed or f"{line}\n" in printed
    assert max(map(len, printed.split("\n"))) <= columns
    layer, head, _ = overview.largest("previous", 1)[0]
    assert f"--layer {layer} --head {head}." in " ".join(printed.split())
    assert regard.explanation.trace.READING_NOTE in " ".join(printed.split())
    assert "\x1b" not in printed


def test_digits_are_as_many_as_asked_for(folder):
    printed = succeed("--model", folder, "--text", TEXT, "--digits", 5)
    assert f"{regard.models.load(folder).overview(TEXT).own[0, 0]:.5f}" in printed


def test_one_head_is_explained_like_any_problem(folder):
    of_head = ("--model", folder, "--text", TEXT, "--layer", 1, "--head", 2)
    printed = succeed(*of_head, "--step", "weights")
    assert "the@1" in printed
    explanation = regard.models.load(folder).explain(TEXT, 1, 2)
    for step in ("weights", "output"):
        data = json.loads(succeed(*of_head, "--json", "--step", step))
        np.testing.assert_array_equal(
            data["steps"][0]["value"], explanation.steps[step].value.tolist()
        )
    walk = succeed(*of_head, "--why", "output", "cat", 0)
    assert "O[cat, 0] = " in walk
    assert walk.rstrip().split("\n")[-1].startswith("To follow another one")
    assert "entropy" in succeed(*of_head, "--statistics")


def test_all_heads_of_a_layer_go_through_the_output_projection(folder):
    data = json.loads(succeed("--model", folder, "--text", TEXT, "--layer", 0, "--json"))
    names = [step["name"] for step in data["steps"]]
    assert names[-1] == "lse" or "projected_output" in names
    assert data["heads"] == 3


def test_the_overview_as_json(folder):
    data = json.loads(succeed("--model", folder, "--text", TEXT, "--json"))
    assert (data["format"], data["layers"], data["heads"]) == ("regard-overview/1", 2, 3)
    overview = regard.models.load(folder).overview(TEXT)
    np.testing.assert_array_equal(data["measures"]["entropy"], overview.entropy)


def test_a_head_can_be_saved_as_a_problem_and_explained_again(folder):
    of_head = ("--model", folder, "--text", TEXT, "--layer", 1, "--head", 2)
    result = call(*of_head, "--save", "head.npz", "--step", "output")
    assert (result.exit_code, result.stderr) == (0, "saved head.npz\n")
    assert succeed("head.npz", "--step", "output") == result.stdout


def test_no_file_of_the_model_is_replaced(folder):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "other").symlink_to(folder / "config.json")
    of_head = ("--model", folder, "--text", TEXT, "--layer", 1, "--force")
    for name in ("config.json", "model.safetensors", "other", "1_Pooling/config.json"):
        before = (folder / name).read_bytes()
        for option in ("--save", "--html"):
            assert "would replace the input" in refuse(*of_head, option, folder / name)
        assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("head", [(), ("--head", 2)])
def test_a_layer_can_be_written_as_a_page(folder, head):
    result = call("--model", folder, "--text", TEXT, "--layer", 1, *head, "--html", "page.html")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "saved page.html\n")
    page = (folder.parent / "page.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")


def test_a_text_that_is_too_long_is_cut_on_request(folder):
    long = "the cat waits . " * 4
    said = refuse("--model", folder, "--text", long)
    assert "the model takes 16" in said
    assert "shorten it, or pass --truncate to leave out the rest" in said
    assert said == refuse("--model", folder, "--text", long, "--layer", 0)
    succeed("--model", folder, "--text", long, "--truncate")
    succeed("--model", folder, "--text", long, "--truncate", "--layer", 0, "--step", "weights")


def test_labels_and_names_of_files_cannot_do_anything_to_a_terminal(tmp_path):
    words = ["\x1b[31mred" if word == "cat" else word for word in tiny_bert.WORDS]
    folder = tiny_bert.write(tmp_path / "a\x1bb", words=words)
    printed = succeed("--model", folder, "--text", "the \x1b[2J\u202e dog")
    printed += refuse("--model", f"{folder}\x1b", "--text", TEXT)
    assert not {"\x1b", "\u202e"} & set(printed)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "bert"], '--model needs the words to read, such as --text "the cat sat"'),
        (["she-likes-coffee", "--model", "bert"], "leave out --model to explain she-likes-coffee"),
        (["x", "--model", "bert", "--text", "a"], "or x to explain the model"),
        (["--model", "bert", "--text", "a", "--format", "json"], "standard input only"),
        (["--model", "bert", "--text", "a", "--seed", "0"], "--seed is for random vectors"),
        (["--model", "bert", "--text", "a", "--causal"], "--causal is for random vectors"),
        (["--model", "bert", "--text", "a", "--head", "0"], "--head goes with --layer only"),
        (["--model", "bert", "--text", "a", "--step", "weights"], "--step goes with --layer"),
        (["--model", "bert", "--text", "a", "--why", "scale"], "--why goes with --layer"),
        (["--model", "bert", "--text", "a", "--statistics"], "--statistics goes with --layer"),
        (["--model", "bert", "--text", "a", "--save", "x.npz"], "--save goes with --layer"),
        (["--model", "bert", "--text", "a", "--html", "x.html"], "--html goes with --layer"),
        (["--model", "bert", "--text", "a", "--layer", "9"], "layer is 9; it must be 0 to 1"),
        (
            ["--model", "bert", "--text", "a", "--layer", "0", "--head", "9"],
            "head is 9; it",
        ),
        (["--model", "bert", "--text", "a", "--json", "--digits", "3"], "--digits has no effect"),
        (["--model", "nowhere", "--text", "a"], "nowhere: does not exist"),
        (["the-cat-sat", "--layer", "0"], "--layer goes with --model only"),
        (["the-cat-sat", "--truncate"], "--truncate goes with --model only"),
    ],
)
def test_options_that_do_not_go_together_are_refused(folder, words, says):
    assert says in refuse(*words)


def test_without_the_library_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    said = refuse("--model", folder, "--text", TEXT)
    assert (
        'vocab.txt: reading it needs the library tokenizers; pip install "regard[models]"' in said
    )
