"""Faults that no test can notice, by the name that `drawn_mutants` gives them, each with why."""

EXPLAINED = {
    "beyond_answers.py: return (): () -> None": "asked is whether anything was found, by `or`",
    "convention.py: reading: int = 0 # which reading of the function is called: 0 -> -1": (
        "every question names its reading"
    ),
    "fast_path.hpp: if (!name) PyErr_Clear();: !name -> !(!name)": (
        "the name of a type is missing only where there is no memory for one word"
    ),
    "matching.py: @dataclass(eq=False): dataclass(eq=False) -> dataclass()": (
        "a matcher is compared with nothing; what would compare arrays is left out"
    ),
    "measure.py: @dataclass(frozen=True): True -> False": "what is written by nothing is frozen",
    "numbers.js: for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);: < ->  <= ": (
        "an array of bytes takes no number beyond its end"
    ),
    "pictures.js: const SLICE = 7; // milliseconds of work between two frames: 7 -> 8": (
        "a time that was chosen: pictures are drawn in other portions"
    ),
    "precision.py: numbers = np.array([[1, 0, 2, -1], [0, 1, -1, 1], [2, 1, 0, 0], "
    "[-1, 0, 1, 2.0]]): 0 -> 1": (
        "numbers that were chosen: with other small integers scores are exact too"
    ),
    "questions.py: if TYPE_CHECKING:: TYPE_CHECKING -> (not TYPE_CHECKING)": (
        "names for annotations are imported in vain"
    ),
    "safetensors.py: own, begin, end = safe_text(tensor.name, 120), tensor.start - data, "
    "tensor.end - data: 120 -> 119": "a length that was chosen: how much of a name an error shows",
    "visibility.hpp: Span found = {{chunk.n, 0}, least == greatest};: 0 -> 1": (
        "a chunk has a key: a range that ends before it begins is empty, whichever way"
    ),
}
