"""`regard generate`: a language model writes on after a text, word by word as they come."""

from __future__ import annotations

import sys
import time

import typer

from regard.cli.frame import flag, option
from regard.errors import ProblemError, safe_text

EXAMPLES = """\b
Examples:
  regard generate model.gguf --text "The Eiffel Tower is in the city of"
  regard generate SmolLM2 --chat --text "What is attention?" --max-new-tokens 100
"""


def generate(
    model: str = typer.Argument(
        metavar="MODEL", help="A directory as transformers saves it, or a GGUF file."
    ),
    text: str = option("TEXT", "What to write on after, or with --chat to answer.", default=...),
    chat: bool = flag("--chat", "Read the text as a message, by the model's own template."),
    max_new_tokens: int = option("N", "At most so many tokens.", min=1, default=50),
    temperature: float = option("T", "0: always the likeliest token.", min=0.0, default=0.0),
    top_k: int | None = option("K", "Draw from the K likeliest tokens only.", min=1),
    top_p: float | None = option("P", "Draw from the fewest that have together P."),
    seed: int = option("N", "For drawing.", min=0, default=0),
) -> None:
    """Write on after a text. Tokens per second go to standard error."""
    from regard.models import LanguageModel, load

    began = time.perf_counter()
    loaded = load(model)
    if not isinstance(loaded, LanguageModel):
        raise ProblemError(
            f"{safe_text(model, 200)}: is an encoder, which writes no text; "
            "regard explain --model shows where it reads"
        )
    ready = time.perf_counter()
    first: list[float] = []

    def write(piece: str) -> None:
        first.append(time.perf_counter())
        sys.stdout.write("\n".join(safe_text(line) for line in piece.split("\n")))
        sys.stdout.flush()

    prompt = loaded.prompt([{"role": "user", "content": text}]) if chat else text
    if not chat:
        write(text)
        first.clear()
    made = loaded.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stream=write,
    )
    typer.echo()
    ended, count = time.perf_counter(), len(made.tokens)
    start = first[0] if first else ended
    speed = f", {(count - 1) / (ended - start):.1f} tokens/s" if count > 1 and ended > start else ""
    typer.echo(
        f"loaded in {ready - began:.1f} s, first text after {start - ready:.2f} s, "
        f"{count} tokens{speed}; ended by {made.reason}",
        err=True,
    )
