"""Everything that can be checked, each in an environment of its own: `nox`, or `nox -s lint`."""

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "tests"]
REQUIRED = "distribution,fused,ml_dtypes,safetensors,tokenizers"
PROJECT = nox.project.load_toml("pyproject.toml")


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def tests(session: nox.Session) -> None:
    session.install(".[test]")
    session.run(
        "pytest",
        *session.posargs,
        env={"REGARD_REQUIRE": "distribution,fused,compiler,ml_dtypes,safetensors,tokenizers"},
    )


@nox.session
def neighbours(session: nox.Session) -> None:
    session.install(".[test,torch,jax]", "expecttest")
    required = {"REGARD_REQUIRE": "distribution,fused,ml_dtypes,torch,jax,expecttest"}
    session.run(
        "pytest", "tests/interop", "tests/test_docs.py", "tests/test_house.py", env=required
    )


@nox.session
def lint(session: nox.Session) -> None:
    session.install("ruff")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    session.install(".[dev]")
    session.run("mypy", "--strict", "src")


@nox.session(python="3.11")
def minimum(session: nox.Session) -> None:
    """The tests with the oldest Python and the oldest dependencies that are said to work."""
    oldest = [one.replace(">=", "==") for one in PROJECT["project"]["dependencies"]]
    session.install(".[test]", *oldest)
    session.run("pytest", *session.posargs, env={"REGARD_REQUIRE": "distribution"})
