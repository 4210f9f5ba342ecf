"""Small faults, each with the promise that it breaks and the test that must notice it.

    python tests/mutants.py            # all of them; nox -s mutants brings what that needs
    python tests/mutants.py G8 G11     # those of some promises
    python tests/mutants.py --full     # noticed by the cases of `pytest --full`

Owns the list and the lane. The repository is copied, its native module built, and every test named
must pass; faults whose test has no case in plain `pytest` wait for --full. Then one fault after the
other is put in, what changed is compiled, the test must fail, and the fault is taken out again.
Ends with 1 if a fault goes unnoticed. What is promised is in docs/guarantees.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CPP = "compute/kernels/cpp/"
LEFT_OUT = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "dist", "venv", "*.so", "*.egg-info"
)
LONGEST = 900.0  # seconds for one test, after which it counts as hanging


class Mutant(NamedTuple):
    """One fault: `old` occurs once in the file and becomes `new`."""

    promise: str
    fault: str
    file: str  # below src/regard
    old: str
    new: str
    test: str  # file::function; the file is the only one of its name
    cases: str  # which of its cases, as pytest's -k has it


MUTANTS = [
    Mutant(
        "G1",
        "a hidden value is multiplied by its weight of 0 instead of being skipped",
        CPP + "tile.hpp",
        "        count += seen(j);\n",
        "        count++;\n",
        "test_semantics_masks.py::test_masked_means_absent_for_keys_that_no_row_sees",
        "fused and float32",
    ),
    Mutant(
        "G1",
        "hidden scores become a very low number instead of −∞",
        CPP + "softmax.hpp",
        "return select(seen, x, all(-infinity<T>()));",
        "return select(seen, x, all(T(-1e9)));",
        "test_semantics_masks.py::test_masked_means_absent_for_keys_that_no_row_sees",
        "fused and float32",
    ),
    Mutant(
        "G1",
        "the backward steps multiply with what is hidden",
        "textbook/gradients.py",
        'over="visible" if over else "all"',
        'over="all"',
        "test_backward.py::"
        "test_a_hidden_key_has_a_gradient_of_zero_and_changes_no_byte_whatever_is_in_it",
        "",
    ),
    Mutant(
        "G1",
        "hidden keys contribute to the gradient of a query",
        "explanation/contributions.py",
        "parts = np.where(seen[:, None] if hidden_terms else seen, parts, 0)",
        "parts = np.where(seen[:, None] if not hidden_terms else True, parts, 0)",
        "test_explained_gradients.py::"
        "test_what_the_terms_of_a_product_add_to_its_rows_adds_up_to_it",
        "",
    ),
    Mutant(
        "G1",
        "the derivation of a hidden gradient shows what its terms would be",
        "explanation/derive.py",
        "elif all(verdict.visible for verdict in verdicts):",
        "else:",
        "test_derivation.py::test_every_cell_of_a_designed_problem_says_whether_it_is_rounded",
        "pulled",
    ),
    Mutant(
        "G1",
        "weights of hidden keys stay in the backward pass",
        CPP + "gradient_rows.hpp",
        "return Extra::hides || Extra::biased ? (Vec<T>)(visible & (Bits<T>)x) : x;",
        "return x;",
        "test_gradients.py::test_what_is_hidden_has_no_gradient_and_changes_none",
        "fused",
    ),
    Mutant(
        "G1",
        "the page multiplies with the gradient of a hidden weight",
        "views/report/operations.js",
        "softmax_gradient: { value: (p, dP, delta) => p * (dP - delta), hidden: 0 }",
        "softmax_gradient: { value: (p, dP, delta) => p * (dP - delta) }",
        "test_report_script.py::test_the_page_computes_every_cell_from_what_is_given",
        "gradients and odd",
    ),
    Mutant(
        "G2",
        "a row that saw nothing is divided by its sum of 0",
        CPP + "finish.hpp",
        "divide(out, divisor_of(w.how, state.divisor), direct",
        "divide(out, state.divisor, direct",
        "test_semantics_masks.py::test_empty_row_is_zero_among_all_masks_of_up_to_six_keys",
        "fused and float64 and None",
    ),
    Mutant(
        "G3",
        "a row whose every score is below float64 counts as one in range",
        CPP + "finish.hpp",
        "top < infinity<double>() && !low;",
        "top < infinity<double>();",
        "test_semantics_numbers.py::test_range_of_weights_where_every_score_is_beyond_float64",
        "fused",
    ),
    Mutant(
        "G2",
        "the output of a row that saw nothing is what its memory held before",
        CPP + "kernel.hpp",
        "        if (nothing(w.s.states[r])) clear(w.s.out + r * w.wide, w.wide);\n",
        "        if (nothing(w.s.states[r])) continue;\n",
        "test_semantics_masks.py::test_empty_row_is_zero_among_all_masks_of_up_to_six_keys",
        "fused and float64 and None",
    ),
    Mutant(
        "G2",
        "a row whose visible scores are all −∞ counts as empty",
        CPP + "retry_float64.hpp",
        "return state = kAgain<double>, true;",
        "return true;",
        "test_semantics_masks.py::test_empty_row_is_not_one_whose_scores_are_all_minus_infinity",
        "fused",
    ),
    Mutant(
        "G2",
        "NaN in a row that sees no key reaches the sink's gradient",
        "compute/dispatch.py",
        'if "sink" in call.wrt:',
        "if not call.wrt:",
        "test_gradients.py::test_a_row_that_sees_no_key_leaves_the_sink_its_gradient",
        "fused",
    ),
    Mutant(
        "G3",
        "rows that left the range of float32 are not computed again",
        CPP + "kernel.hpp",
        "    else if (retries.count) retry_in_float64(q, piece, retries, at);\n",
        "",
        "test_semantics_numbers.py::test_range_of_finite_inputs_gives_finite_outputs_among_the_values",
        "fused and float32 and 1e+30",
    ),
    Mutant(
        "G3",
        "rows of sigmoids that left the range of float32 are not computed again",
        CPP + "kernel.hpp",
        "    if (q.sigmoid) retry_in_extended_range(w, retries);\n    else",
        "   ",
        "test_sigmoid_weights.py::test_numbers_beyond_the_range_and_visible_nan_and_infinity",
        "fused",
    ),
    Mutant(
        "G5",
        "the passes over tiles keep subnormal numbers, which is slow",
        CPP + "kernel.hpp",
        "    const FlushToZero<T> passes;\n    if (q.before_count)",
        "    if (q.before_count)",
        "test_fused_numbers.py::test_weights_below_the_smallest_normal_number_of_float32_are_zero",
        "baseline",
    ),
    Mutant(
        "G5",
        "the backward pass keeps subnormal numbers, which is slow",
        CPP + "backward.hpp",
        "    const FlushToZero<T> passes;\n",
        "",
        "test_fused_numbers.py::test_weights_below_the_smallest_normal_number_of_float32_are_zero",
        "baseline",
    ),
    Mutant(
        "G6",
        "float64 loses its subnormal numbers",
        CPP + "simd.hpp",
        "        if (sizeof(T) == 4) _mm_setcsr(state);\n",
        "        _mm_setcsr(state);\n",
        "test_fused_numbers.py::test_weights_below_the_smallest_normal_number_of_float32_are_zero",
        "baseline",
    ),
    Mutant(
        "G5",
        "subnormal results are 0",
        CPP + "kernel.hpp",
        "    const KeepSubnormals<T> results;\n",
        "",
        "test_fused_numbers.py::test_small_values_are_as_exact_as_others_beside_whatever",
        "baseline and float32",
    ),
    Mutant(
        "G5",
        "sums of small values are left as the passes made them",
        CPP + "kernel.hpp",
        "        if (small[r]) retries.add_small(r);\n",
        "",
        "test_fused_numbers.py::test_small_values_are_as_exact_as_others_beside_whatever",
        "baseline and float32",
    ),
    Mutant(
        "G5",
        "a part of the keys loses small values",
        CPP + "kernel.hpp",
        "        if (small[r]) w.s.states[r] = kAgain<T>;\n",
        "",
        "test_dask.py::test_small_values_are_those_of_one_call",
        "300",
    ),
    Mutant(
        "G5",
        "the slope of a sigmoid is taken by the softmax's",
        CPP + "gradient_rows.hpp",
        "grad = kept(found.slope * load(d + j));",
        "grad = kept(found.weight * load(d + j));",
        "test_sigmoid_weights.py::test_every_number_is_within_its_bound",
        "fused and float32",
    ),
    Mutant(
        "G3",
        "rows that left the range of float64 are not computed again",
        CPP + "driver.cpp",
        "request.extended_range_row = extended_range_row;",
        "request.extended_range_row = [](const Request&, int64_t, int64_t, int64_t, bool) {};",
        "test_semantics_numbers.py::test_range_ends_at_no_score_bias_or_value",
        "fused and float64",
    ),
    Mutant(
        "G3",
        "products of float64 are not brought into range",
        CPP + "extended_range.cpp",
        "std::ilogb(most) : 0) - 500",
        "std::ilogb(most) : 0) - 5000",
        "test_semantics_numbers.py::test_range_of_products_is_that_of_no_type",
        "fused and float64",
    ),
    Mutant(
        "G3",
        "a gradient of the scale that leaves float32 is not computed again",
        "compute/kernels/fused.py",
        "for sums in rows.values() if beyond.size else ():",
        "for sums in ():",
        "test_gradients.py::test_gradients_of_sink_and_scale_beyond_float32_are_finite",
        "fused",
    ),
    Mutant(
        "G5",
        "the output is pulled away from its target",
        "textbook/loss.py",
        "pair = (last.own, loss[0].own)",
        "pair = (loss[0].own, last.own)",
        "test_explained_gradients.py::"
        "test_every_gradient_of_every_example_is_the_slope_of_the_loss_in_60_digits",
        "coffee",
    ),
    Mutant(
        "G5",
        "a score of −∞ that finite inputs overflow to is taken at its word",
        CPP + "tile.hpp",
        "found.left[r] |= odd && any_seen_special(seen, x, keys);",
        "",
        "test_semantics_numbers.py::test_range_of_partial_sums_that_overflow_changes_no_number",
        "fused and float32",
    ),
    Mutant(
        "G5",
        "the reference takes a score of −∞ that finite inputs overflow to at its word",
        "compute/kernels/reference.py",
        "    broken = np.asarray((seen & ~finite).any(axis=-1))\n",
        "    broken = np.zeros(len(seen), np.bool_)\n",
        "test_semantics_numbers.py::test_range_of_partial_sums_that_overflow_changes_no_number",
        "reference and float32",
    ),
    Mutant(
        "G5",
        "the reference's gradients take a score of −∞ that finite inputs overflow to at its word",
        "compute/kernels/reference.py",
        "if not (whole and _is_finite(found)):",
        "if not _is_finite(found):",
        "test_reference_gradients.py::"
        "test_a_score_that_overflows_on_its_way_to_a_number_is_that_number",
        "",
    ),
    Mutant(
        "G4",
        "an infinite value is lost where its weight underflows to 0",
        CPP + "retry_float64.hpp",
        "        if (special(apart[e])) out[e] = apart[e];\n",
        "",
        "test_semantics_numbers.py::test_an_infinite_value_that_is_seen_is_infinite_however_small_its_weight",
        "fused and float32",
    ),
    Mutant(
        "G4",
        "the reference multiplies an infinite value by a weight that underflowed to 0",
        "compute/extended_range.py",
        "lost = seen & (fraction == -np.inf)",
        "lost = seen & (exponentials == 0)",
        "test_semantics_numbers.py::test_an_infinite_value_that_is_seen_is_infinite_however_small_its_weight",
        "reference and float32",
    ),
    Mutant(
        "G4",
        "the smallest exponent takes the place of a NaN",
        CPP + "simd.hpp",
        "x = larger(all(-1076.0), x);",
        "x = larger(x, all(-1076.0));",
        "test_fused_numbers.py::test_a_nan_is_never_hidden_whatever_its_bits",
        "float32",
    ),
    Mutant(
        "G4",
        "a value whose weight underflowed to 0 is skipped, NaN or not",
        CPP + "tile.hpp",
        "        count += seen(j);\n",
        "        count += seen(j) && p[j] != 0;\n",
        "test_semantics_numbers.py::test_nan_is_never_hidden_by_a_weight_that_underflows",
        "fused",
    ),
    Mutant(
        "G4",
        "NaN in grad_output does not reach the gradient of values",
        CPP + "backward.hpp",
        "if (k.w.d_value && t.known[r].special_grad)",
        "if (false)",
        "test_gradients.py::test_a_nan_reaches_what_depends_on_it_and_no_more",
        "fused",
    ),
    Mutant(
        "G5",
        "2^x has a polynomial of one degree less",
        CPP + "simd.hpp",
        "polynomial(f, all(1.535336188319500e-4f), ",
        "polynomial(f, all(0.0f), ",
        "test_fused_exponential.py::test_the_exponential_is_off_by_one_ulp_at_most",
        "not half",
    ),
    Mutant(
        "G5",
        "the sum of a chunk that is merged is not brought to the common maximum",
        CPP + "softmax.hpp",
        "state.sum = state.sum * keep + part.sum * take;",
        "state.sum = state.sum * keep + part.sum;",
        "test_fused_numbers.py::test_every_number_is_within_its_bound_around_the_chunks",
        "float32 and 300",
    ),
    Mutant(
        "G5",
        "the backward pass leaves out δ",
        CPP + "gradient_rows.hpp",
        "kept(weight * (load(d + j) - delta))",
        "kept(weight * load(d + j))",
        "test_gradients.py::test_given_results_change_nothing_but_the_time",
        "float32 and fused",
    ),
    Mutant(
        "G5",
        "the sink's gradient has the other sign",
        CPP + "gradient_rows.hpp",
        "w.d_sink[n] = -sink * delta;",
        "w.d_sink[n] = sink * delta;",
        "test_gradients.py::test_every_option_has_its_gradient",
        "sink and fused",
    ),
    Mutant(
        "G5",
        "the gradient of lse is added to δ",
        CPP + "gradient_rows.hpp",
        "delta -= w.grad_lse[n];",
        "delta += w.grad_lse[n];",
        "test_gradients.py::test_the_gradient_of_lse_is_taken_too",
        "fused",
    ),
    Mutant(
        "G5",
        "the slope of a softcap is another one in the page",
        "views/report/operations.js",
        "const e = Math.exp(-2 * Math.abs(x / softcap));",
        "const e = Math.exp(-Math.abs(x / softcap));",
        "test_report_script.py::test_the_page_computes_every_cell_from_what_is_given",
        "gradients and option",
    ),
    Mutant(
        "G5",
        "δ runs along the output where the softmax runs over the wrong axis",
        "textbook/gradients.py",
        'if forward["row_sums"].running != forward["output"].running:',
        'if "row_sums" not in forward:',
        "test_report_script.py::test_gradients_of_a_mistake_are_the_slopes_of_what_it_computes",
        "",
    ),
    Mutant(
        "G5",
        "swapped queries and keys lead back to each other's rows",
        "textbook/gradients.py",
        "names |= {new: old for old, new in names.items() if new not in names}",
        "names |= {}",
        "test_report_script.py::test_gradients_of_a_mistake_are_the_slopes_of_what_it_computes",
        "",
    ),
    Mutant(
        "G5",
        "a gradient step in the page climbs",
        "views/report/descent.js",
        "values[k] - rate * slopes[own][row][k]",
        "values[k] + rate * slopes[own][row][k]",
        "test_report_script.py::test_after_each_gradient_step_the_page_has_what_python_computes",
        "",
    ),
    Mutant(
        "G5",
        "the check of a derivative halves nothing",
        "views/report/descent.js",
        "[0, by / 2, by]",
        "[0, by, by]",
        "test_report_script.py::test_a_changed_number_moves_the_loss_by_its_slope",
        "",
    ),
    Mutant(
        "G5",
        "the check of a derivative shows what the slope predicts as what happened",
        "views/report/nudging.js",
        '["it moves by", signed(moved)]',
        '["it moves by", signed(line)]',
        "test_report_browser.py::test_a_derivative_is_checked_by_keys_alone",
        "",
    ),
    Mutant(
        "G5",
        "the curve of the loss leaves out every other step",
        "views/report/curve.js",
        "Math.ceil(losses.length / MOST_POINTS)",
        "Math.ceil(losses.length / MOST_POINTS) + 1",
        "test_report_browser.py::test_steps_run_by_keys_bring_the_loss_down_and_can_be_undone",
        "",
    ),
    Mutant(
        "G6",
        "exponentials of float64 keep the digits of float32 alone",
        CPP + "simd.hpp",
        "    p = p + all(1.0);\n",
        "    p = (Vec<double>)((Bits<double>)(p + all(1.0)) >> 29 << 29);\n",
        "test_semantics_numbers.py::test_accuracy_of_float64_is_that_of_float64",
        "fused",
    ),
    Mutant(
        "G6",
        "a call on the fast path computes float64 in float32",
        CPP + "fast_path.hpp",
        "q.wide = PyArray_TYPE(arrays[0]) == NPY_DOUBLE;",
        "q.wide = false;",
        "test_fused_fast_path.py::test_a_fast_call_has_the_bytes_of_the_general_way",
        "float64 and 257",
    ),
    Mutant(
        "G7",
        'precision="exact" sums in float32',
        "compute/kernels/fused.py",
        "if wide or far else request.accumulator",
        "if wide or far else np.result_type(np.float32, request.dtype)",
        "test_semantics_numbers.py::test_exact_precision_is_correctly_rounded",
        "fused and float32 and 3.0",
    ),
    Mutant(
        "G7",
        'precision="exact" rounds twice on the way to float16',
        CPP + "rows.hpp",
        "((uint16_t*)to)[i] = to_half(to_odd(x)); break;",
        "((uint16_t*)to)[i] = to_half(float(x)); break;",
        "test_semantics_numbers.py::test_exact_precision_rounds_once_on_the_way_to_a_half_type",
        "fused",
    ),
    Mutant(
        "G7",
        "the factor from scores to exponents is off by 4 units of rounding, which the bound allows",
        CPP + "softmax.hpp",
        "how.unit = T(how.natural * kLog2e);",
        "how.unit = T(how.natural * kLog2e * (1 + 0x1p-22));",
        "test_fused_numbers.py::test_errors_are_as_small_as_those_of_independent_roundings",
        "3.0",
    ),
    Mutant(
        "G7",
        "a dot product is one long sum",
        CPP + "rows.hpp",
        "constexpr int64_t kDepth = 16;",
        "constexpr int64_t kDepth = 4096;",
        "test_fused_numbers.py::test_errors_of_long_sums_are_as_small_as_those_of_sums_in_runs",
        "1024",
    ),
    Mutant(
        "G7",
        "the output of a chunk is one long sum",
        CPP + "rows.hpp",
        "constexpr int64_t kRun = 64;",
        "constexpr int64_t kRun = 256;",
        "test_fused_numbers.py::test_errors_of_long_sums_are_as_small_as_those_of_sums_in_runs",
        "256 and 16",
    ),
    Mutant(
        "G7",
        "δ of a half type comes from the rounded output",
        "compute/kernels/fused.py",
        "output.dtype.itemsize < accumulator.itemsize:",
        "output.dtype.itemsize < 2:",
        "test_gradients.py::test_given_results_change_nothing_but_the_time",
        "float16 and fused",
    ),
    Mutant(
        "G7",
        "gradients of half types that are summed over broadcast axes are rounded before",
        "compute/gradients.py",
        "return self.request.accumulator if summed else given.dtype",
        "return given.dtype",
        "test_gradients.py::test_sums_over_broadcast_axes_round_half_types_once",
        "fused",
    ),
    Mutant(
        "G8",
        "chunks that threads share are merged from right to left",
        CPP + "kernel.hpp",
        "for (int64_t chunk = 0; chunk < w.chunks; chunk++) {\n            merge_part(",
        "for (int64_t chunk = w.chunks - 1; chunk >= 0; chunk--) {\n            merge_part(",
        "test_fused_bytes.py::test_the_number_of_threads_changes_no_byte",
        "one and row",
    ),
    Mutant(
        "G8",
        "a few rows add over the width in another order than many",
        CPP + "pack.hpp",
        "if (i.value == 0 && d && d % kDepth == 0)",
        "if (i.value == 0 && d && d % (2 * kDepth) == 0)",
        "test_fused_bytes.py::test_a_row_alone_has_the_bytes_it_has_among_others",
        "float32 and none",
    ),
    Mutant(
        "G8",
        "the second number of a pair keeps bits of the first",
        CPP + "simd.hpp",
        "second = (Vec<float>)((Wide)pairs & 0xffff0000);",
        "second = (Vec<float>)pairs;",
        "test_fused_bytes.py::"
        "test_a_few_rows_read_half_types_where_they_lie_and_give_the_bytes_of_float32",
        "bfloat16",
    ),
    Mutant(
        "G8",
        "half a block of columns is read as pairs",
        CPP + "pack.hpp",
        "for (; d + N * W <= D; d += N * W)",
        "for (; d + W <= D; d += N * W)",
        "test_fused_bytes.py::"
        "test_a_few_rows_read_half_types_where_they_lie_and_give_the_bytes_of_float32",
        "float16",
    ),
    Mutant(
        "G8",
        "many rows, too, read half types where they lie",
        CPP + "kernel.hpp",
        "few ? direct<T>(q.value, q.E) : in_place<T>(q.value, q.E)",
        "direct<T>(q.value, q.E)",
        "test_fused_bytes.py::"
        "test_a_few_rows_read_half_types_where_they_lie_and_give_the_bytes_of_float32",
        "float16",
    ),
    Mutant(
        "G4",
        "values of half types are read again from the wrong columns",
        CPP + "tile.hpp",
        "load_as<T, K>(row + (e + i * W) * size_of(K))",
        "load_as<T, K>(row + e * size_of(K))",
        "test_fused_bytes.py::"
        "test_a_few_rows_read_half_types_where_they_lie_and_give_the_bytes_of_float32",
        "float16",
    ),
    Mutant(
        "G8",
        "sums over woven values are stored in the order of the weaving",
        CPP + "pairs.hpp",
        "store(to, paired_quarters<0>(sum[r][n], sum[r][n + 1], lanes));",
        "store(to, sum[r][n]);",
        "test_fused_bytes.py::"
        "test_a_few_rows_read_half_types_where_they_lie_and_give_the_bytes_of_float32",
        "bfloat16",
    ),
    Mutant(
        "G8",
        "blocks of keys add to a query's gradient in any order",
        CPP + "backward.hpp",
        "return (!block || reached(turn(head, block - 1), number)) &&",
        "return (number || !block || reached(turn(head, block - 1), number)) &&",
        "test_fused_gradients.py::"
        "test_blocks_of_keys_add_in_order_though_later_ones_are_ready_first",
        "",
    ),
    Mutant(
        "G9",
        "an explanation ignores that query heads share keys on the way back",
        "explanation/build.py",
        'grouped=sizes.get("H") != sizes.get("G")',
        "grouped=False",
        "test_explained_gradients.py::"
        "test_the_fused_kernel_has_the_same_gradients_within_its_bound",
        "",
    ),
    Mutant(
        "G9",
        "the fast path ignores window",
        CPP + "fast_path.hpp",
        "{Mask, Bias, Window, Offset,",
        "{Mask, Bias, Offset,",
        "test_fused_fast_path.py::test_options_that_the_fast_path_leaves_come_out_as_the_general_way_has_them",
        "window",
    ),
    Mutant(
        "G9",
        "a row that is computed again ignores softcap",
        CPP + "extended_range.cpp",
        "    if (q.softcap != 0) {\n",
        "    if (false) {\n",
        "test_semantics_options.py::"
        "test_every_option_counts_in_rows_that_leave_the_range_of_their_type",
        "softcap and float64",
    ),
    Mutant(
        "G9",
        'with offset="end" a packed text begins with its first key',
        "rules/visibility.py",
        "text.high - text.last if at_end else text.low - text.first",
        "text.low - text.first",
        "test_semantics_masks.py::test_position_in_segments_is_that_within_the_text",
        "",
    ),
    Mutant(
        "G9",
        'offset="end" is the last key, padding or not',
        "masks.py",
        "_replace(high=self.lengths[..., None])",
        "_replace()",
        "test_semantics_masks.py::test_position_at_the_end_is_that_of_the_lengths",
        "",
    ),
    Mutant(
        "G9",
        "a bias of positions is that of the row, wherever its text begins",
        CPP + "visibility.hpp",
        "q.bias_rows ? q.bias_rows[row.b * q.L + row.i] : row.i",
        "row.i",
        "test_packed_texts.py::test_a_thousand_packed_calls_have_the_numbers_of_their_texts_alone",
        "baseline",
    ),
    Mutant(
        "G9",
        "the left side of window is ignored",
        CPP + "visibility.hpp",
        "const KeyRange range = window_range(position_of(q, b, i), q.left, q.right);",
        "const KeyRange range = window_range(position_of(q, b, i), -1, q.right);",
        "test_semantics_options.py::"
        "test_every_option_counts_in_rows_that_leave_the_range_of_their_type",
        "window",
    ),
    Mutant(
        "G9",
        "a row that is computed again leaves the sink out of its sum",
        CPP + "extended_range.cpp",
        "        total = std::exp((sink + -most).near());\n",
        "",
        "test_semantics_options.py::"
        "test_every_option_counts_in_rows_that_leave_the_range_of_their_type",
        "sink",
    ),
    Mutant(
        "G9",
        "a row takes every segment for its own",
        CPP + "visibility.hpp",
        "return theirs[j] == mine;",
        "return true;",
        "test_semantics_options.py::"
        "test_every_option_counts_in_rows_that_leave_the_range_of_their_type",
        "segments",
    ),
    Mutant(
        "G9",
        "a head that the page does not show is accepted and ignored",
        "cli/explain.py",
        'refuse_with("--html alone", head)',
        "pass",
        "test_cli.py::test_bad_input_of_explain_is_one_line",
        "html",
    ),
    Mutant(
        "G9",
        "mapped by PyTorch, what all elements share has one gradient for all",
        "interop/torch_gradients.py",
        "one.expand(info.batch_size, *one.shape)",
        "one[None]",
        "test_torch_gradients.py::test_functions_of_torch_func_go_through",
        "",
    ),
    Mutant(
        "G9",
        "mapped by JAX, what all elements share has one gradient for all",
        "interop/jax_primitives.py",
        "repeats = 1 if primitive is attention else size",
        "repeats = 1",
        "test_jax_gradients.py::test_transforms_go_through",
        "vmap",
    ),
    Mutant(
        "G9",
        "the gradient of JAX's residual is dropped",
        "interop/jax_primitives.py",
        "    if grad_lse is not None:\n",
        "    if False:\n",
        "test_jax_gradients.py::test_gradients_are_those_of_jax",
        "plain",
    ),
    Mutant(
        "G9",
        "the gradient passes the softcap as if it were straight",
        CPP + "gradient_rows.hpp",
        "slope = slope_of(how, score);",
        "slope = all(T(1));",
        "test_gradients.py::test_every_option_has_its_gradient",
        "softcap and fused",
    ),
    Mutant(
        "G9",
        "a gradient step in the page moves inputs that were not chosen",
        "views/report/descent.js",
        "  for (const name of names) {",
        "  for (const name of learnable(run)) {",
        "test_report_script.py::test_a_gradient_step_moves_the_chosen_inputs_alone_and_keeps_what_was_changed",
        "",
    ),
    Mutant(
        "G9",
        "a gradient step in the page forgets what the reader changed",
        "views/report/descent.js",
        "const after = new Map(edits);",
        "const after = new Map();",
        "test_report_script.py::test_a_gradient_step_moves_the_chosen_inputs_alone_and_keeps_what_was_changed",
        "",
    ),
    Mutant(
        "G9",
        "undoing a gradient step goes back to the first",
        "views/report/learn.js",
        "  show(before.at(-1), () => {",
        "  show(before[0], () => {",
        "test_report_browser.py::test_steps_run_by_keys_bring_the_loss_down_and_can_be_undone",
        "",
    ),
    Mutant(
        "G10",
        "memory that was not to be had is used",
        CPP + "crew.hpp",
        "if (!data_) throw std::bad_alloc();",
        "",
        "test_fused_memory.py::test_sizes_beyond_all_memory_are_a_memory_error",
        "",
    ),
    Mutant(
        "G10",
        "digits of any alphabet are a number of threads",
        "compute/native.py",
        "if stated.isascii() and stated.isdecimal():",
        "if stated.isdecimal():",
        "test_environment.py::"
        "test_a_number_of_threads_that_is_none_is_refused_by_the_first_call_that_needs_it",
        "",
    ),
    Mutant(
        "G10",
        "the fast path uses all CPUs where REGARD_NUM_THREADS is refused",
        "compute/native.py",
        'module.use(target if known else "", ',
        "module.use(target, ",
        "test_environment.py::"
        "test_a_number_of_threads_that_is_none_is_refused_by_the_first_call_that_needs_it",
        "",
    ),
    Mutant(
        "G10",
        "the fast path does not compare the widths of query and key",
        CPP + "fast_path.hpp",
        "ks[axes - 1] != width || ",
        "",
        "test_fused_fast_path.py::test_inputs_that_the_fast_path_leaves_come_out_as_the_general_way_has_them",
        "another and width",
    ),
    Mutant(
        "G10",
        "an array that is lazy or elsewhere is read without a word",
        "boundary/arrays.py",
        "        _check_that_it_is_here(name, value)\n",
        "",
        "interop/test_elsewhere.py::"
        "test_what_is_lazy_or_elsewhere_is_refused_with_what_to_pass_instead",
        "cupy",
    ),
    Mutant(
        "G10",
        "an exception leaves a thread",
        CPP + "crew.hpp",
        "} catch (const std::bad_alloc&) {  // from extended_range_row",
        "} catch (const std::bad_function_call&) {  // from extended_range_row",
        "test_fused_allocations.py::"
        "test_every_allocation_that_fails_is_a_memory_error_and_the_next_call_works",
        "rows and again",
    ),
    Mutant(
        "G10",
        "an lse of another call is taken",
        "compute/gradients.py",
        "(np.abs(off) > bound)",
        "(np.abs(off) > 1e9 * bound)",
        "test_gradients.py::test_results_of_another_call_are_noticed",
        "fused",
    ),
    Mutant(
        "G10",
        "a page learns on while the loss rises",
        "views/report/descent.js",
        "const RISES = 5;",
        "const RISES = 500;",
        "test_report_script.py::test_the_parts_of_the_script_pass_their_own_tests",
        "",
    ),
    Mutant(
        "G11",
        "rows are read in whole vectors to their end and beyond",
        CPP + "rows.hpp",
        "for (; i + kLanes<T> <= n; i += kLanes<T>)",
        "for (; i < n; i += kLanes<T>)",
        "test_fused_guard_pages.py::test_nothing_is_touched_beyond_the_arrays",
        "value and width",
    ),
    Mutant(
        "G11",
        "keys that fill a vector of lanes only in part are read as if they filled it",
        CPP + "pack.hpp",
        "direct<T>(array, columns) && j + kLanes<T> <= c.n",
        "direct<T>(array, columns)",
        "test_fused_guard_pages.py::test_nothing_is_touched_beyond_the_arrays",
        "value and width",
    ),
    Mutant(
        "G11",
        "rows of the output are written in whole vectors",
        CPP + "finish.hpp",
        "return q.kind == kind_of<T>() && q.E % kLanes<T> == 0;",
        "return q.kind == kind_of<T>();",
        "test_fused_guard_pages.py::test_nothing_is_touched_beyond_the_arrays",
        "value and width",
    ),
    Mutant(
        "G11",
        "a chunk of a bias is read as if it were full",
        CPP + "tile.hpp",
        "if (chunk.n % kPanel<T> == 0 && in_place<T>(q.bias, chunk.n))",
        "if (in_place<T>(q.bias, kChunk))",
        "test_fused_guard_pages.py::test_nothing_is_touched_beyond_the_arrays",
        "masks and biases",
    ),
    Mutant(
        "G11",
        "the sum over keys reads the keys that pad the last block",
        CPP + "backward.hpp",
        "const KeyRange real = {whole.low, smaller_of(whole.high, k.chunk.n)};",
        "const KeyRange real = whole;",
        "test_fused_guard_pages.py::test_nothing_is_touched_beyond_the_arrays",
        "gradients",
    ),
    Mutant(
        "G12",
        "the sign of the scale is multiplied into the query itself too",
        CPP + "scratch.hpp",
        "for (int64_t d = 0; d < q.D; d++) query[d] *= sign;",
        "for (int64_t d = 0; d < q.D; d++)\n"
        "                    ((T*)q.query.at(b, row.h, row.i))[d] = query[d] *= sign;",
        "test_semantics_layout.py::test_inputs_are_never_written",
        "fused and float32",
    ),
    Mutant(
        "G12",
        "the kernel writes into out while it still reads what out overlaps",
        "compute/kernels/fused.py",
        "        or any(array is not None and np.may_share_memory(out, array) for array in read)\n",
        "",
        "test_semantics_results.py::test_out_may_overlap_inputs_in_any_way",
        "fused",
    ),
    Mutant(
        "G12",
        "the fast path writes into out while it still reads what out overlaps",
        CPP + "fast_path.hpp",
        "if (may_overlap(array, input)) return nullptr;",
        "if (false && may_overlap(array, input)) return nullptr;",
        "test_fused_fast_path.py::test_out_that_lies_on_an_input_is_left_to_the_general_way",
        "",
    ),
    Mutant(
        "G13",
        "the fast path keeps the lock of the interpreter",
        CPP + "fast_path.hpp",
        "            Unlocked unlocked;\n            // 0: as many",
        "            // 0: as many",
        "test_fused_process.py::test_other_python_threads_run_during_a_call",
        "True",
    ),
    Mutant(
        "G13",
        "nobody looks for signals during a call",
        CPP + "crew.hpp",
        "raised_ = interrupted_();",
        "",
        "test_fused_process.py::test_an_interrupt_ends_a_long_call_at_once_and_the_next_call_works",
        "few and not converted",
    ),
    Mutant(
        "G13",
        "the floating-point state of the caller does not come back",
        CPP + "driver.hpp",
        "if (_mm_getcsr() != before_) _mm_setcsr(before_);",
        "",
        "test_fused_process.py::test_a_call_leaves_the_floating_point_state_and_flags_as_they_were",
        "",
    ),
    Mutant(
        "G13",
        "a child process waits for threads that only its parent has",
        CPP + "threads.cpp",
        "    pool.store(nullptr);\n",
        "",
        "test_fused_process.py::test_a_fork_after_use_leaves_a_child_that_computes",
        "",
    ),
    Mutant(
        "G13",
        "a child that a signal handler made goes on as if its helpers were there",
        CPP + "crew.hpp",
        "raised_ || (threads_ > 1 && forks() != forks_before_)",
        "raised_",
        "test_fused_process.py::test_a_call_that_forks_ends_in_both_processes",
        "",
    ),
    Mutant(
        "G13",
        "in a child that another thread made no signal is looked for",
        CPP + "module.cpp",
        "pthread_atfork(nullptr, nullptr, [] { main_thread = PyThread_get_thread_ident(); });",
        "",
        "test_fused_process.py::test_an_interrupt_ends_a_call_in_a_child_of_another_thread",
        "",
    ),
    Mutant(
        "G13",
        "one CPU more is used than affinity allows",
        CPP + "cpus.cpp",
        "cpus = CPU_COUNT(&set);",
        "cpus = CPU_COUNT(&set) + 1;",
        "test_fused_process.py::test_a_process_on_one_cpu_gets_no_further_thread",
        "",
    ),
    Mutant(
        "G14",
        "a matrix L × S is made, whatever is asked for",
        CPP + "driver.cpp",
        "const Plan plan = plan_of(q, target, call.inner() ? 1 : threads, turns);",
        "const Plan plan = plan_of(q, target, call.inner() ? 1 : threads, turns);\n"
        "    const std::vector<float> matrix(size_t(q.L * q.S), float(threads));\n"
        "    if (!matrix.empty() && matrix[matrix.size() / 2] == 0) return Ending::interrupted;",
        "test_fused_memory.py::test_a_long_call_takes_no_more_memory_whatever_its_rules",
        "",
    ),
    Mutant(
        "G14",
        "the last result is kept until the next call",
        "compute/dispatch.py",
        "    return chosen.run(without_positions(request))",
        "    run.kept = chosen.run(without_positions(request))\n    return run.kept",
        "test_semantics_layout.py::test_memory_is_given_back",
        "",
    ),
    Mutant(
        "G14",
        "over dask, a graph is named by all numbers of arrays that have no memory",
        "interop/dask_arrays.py",
        "tokenize(replace(request, **none), *others)",
        "tokenize(request, *others)",
        "test_dask.py::test_a_graph_takes_no_memory_for_its_arrays",
        "",
    ),
    Mutant(
        "G5",
        "the integers of an int8 cache are cut off, not rounded",
        "compute/quantized.py",
        "np.rint(numbers / scale)",
        "np.trunc(numbers / scale)",
        "test_cache_dtypes.py::test_each_number_of_an_int8_cache_is_within_half_a_step",
        "",
    ),
    Mutant(
        "G4",
        "a NaN in a token of an int8 cache is taken for 0",
        "compute/quantized.py",
        "np.where(finite, scale, np.float32(np.nan))",
        "np.where(finite, scale, np.float32(0))",
        "test_cache_dtypes.py::"
        "test_a_token_with_a_nan_is_nan_in_an_int8_cache_and_hidden_it_is_absent",
        "fused",
    ),
    Mutant(
        "G5",
        "keys of an int8 cache that are turned in registers have the scale 1",
        CPP + "pack.hpp",
        "scaled<K>(columns[n.value], scale));",
        "columns[n.value]);",
        "test_cache_dtypes.py::test_an_int8_cache_gives_the_bytes_of_attention_over_what_it_holds",
        "baseline",
    ),
    Mutant(
        "G5",
        "digits of a query over an int8 cache do not carry",
        CPP + "integers.hpp",
        "(number + borrow) ^ borrow",
        "number",
        "test_fused_integers.py::"
        "test_an_emulation_in_integers_is_within_the_bound_and_has_the_bytes_of_the_target",
        "",
    ),
    Mutant(
        "G1",
        "a hidden NaN of an int8 cache meets its weight",
        CPP + "integers.hpp",
        "if (!seen(j)) x[j] = 0;",
        "if (seen(j)) x[j] += 0;",
        "test_fused_integers.py::test_a_hidden_nan_meets_no_weight_and_a_seen_one_reaches_its_row",
        "",
    ),
    Mutant(
        "G11",
        "rows of an int8 cache are read beyond the last one",
        CPP + "integers.hpp",
        "smaller_of(i, use.count - 1)",
        "i",
        "test_fused_guard_pages.py::test_nothing_is_touched_beyond_the_arrays",
        "int8 and avx512_bf16",
    ),
    Mutant(
        "G8",
        "a token is converted to int8 with the scale of what it was appended with",
        "compute/quantized.py",
        "max(axis=-1, keepdims=True, initial=0)",
        "max(axis=(-2, -1), keepdims=True, initial=0) + np.zeros((*array.shape[:-1], 1))",
        "test_cache_dtypes.py::test_the_grouping_of_appends_changes_no_byte",
        "",
    ),
    Mutant(
        "G10",
        "the file of a cache of another version is read",
        "compute/kv_files.py",
        "if version != VERSION:",
        "if version < VERSION:",
        "test_cache_files.py::test_what_a_file_says_must_fit_together",
        "version",
    ),
    Mutant(
        "G15",
        "a function under diagnosis has the messages of its process among its open files",
        "diagnosis/process/worker.py",
        "        with _opened(inbox, os.O_RDONLY), _opened(outbox, os.O_WRONLY):\n"
        "            pass\n",
        "        raise OSError\n",
        "test_diagnosis_hostile.py::"
        "test_what_a_function_does_to_its_own_process_does_not_change_the_verdict",
        "refuses_open_files",
    ),
    Mutant(
        "G15",
        "a message from the function's process is taken for one whatever its digest",
        "diagnosis/process/protocol.py",
        "    if digest != _digest(key, head[16:] + rest):\n        raise InvalidMessage\n",
        "",
        "test_diagnosis_hostile.py::test_a_changed_byte_makes_a_frame_junk",
        "",
    ),
    Mutant(
        "G15",
        "a process that has left its session outlives a diagnosis",
        "diagnosis/process/supervisor.py",
        "    prctl(PR_SET_CHILD_SUBREAPER, 1)",
        "    prctl(PR_SET_CHILD_SUBREAPER, 0)",
        "test_diagnosis_hostile.py::test_a_process_that_left_its_session_is_ended_and_told",
        "",
    ),
    Mutant(
        "G15",
        "the memory that the processes of a function take together is not counted",
        "diagnosis/process/supervisor.py",
        "if now > before + MAX_MEMORY:",
        "if now > before + 8 * MAX_MEMORY:",
        "test_diagnosis_hostile.py::test_memory_that_no_limit_of_a_process_counts_is_watched",
        "",
    ),
    Mutant(
        "G5",
        "dot instructions divide by the sum of weights that were not rounded",
        CPP + "pairs.hpp",
        "parts[r].divisor = sum_of<float>(sums[r].rounded);",
        "parts[r].divisor = parts[r].sum;",
        "test_fused_pairs.py::test_an_emulation_of_the_dot_is_within_the_bound_and_has_the_bytes_of_the_target",
        "13 and 256",
    ),
    Mutant(
        "G1",
        "a hidden value meets its neighbour in the pair",
        CPP + "pairs.hpp",
        "const Two kept = values.at(m, e) & (int32_t(low | high) - Two{});",
        "const Two kept = values.at(m, e) & (int32_t(low | high ? -1 : 0) - Two{});",
        "test_fused_pairs.py::test_a_hidden_value_never_meets_its_neighbour_in_the_pair",
        "nan",
    ),
    Mutant(
        "G8",
        "numbers that lie apart are taken for neighbours when pairs are copied",
        CPP + "pairs.hpp",
        "numbers[i] = number_at<uint16_t>(from + i * stride);",
        "numbers[i] = number_at<uint16_t>(from + i * 2);",
        "test_fused_pairs.py::test_a_strided_or_odd_array_has_the_bytes_of_a_copy",
        "",
    ),
    Mutant(
        "G9",
        'precision="high" is ignored by the kernel',
        CPP + "targets.cpp",
        "!q.wide && !q.high && ",
        "!q.wide && ",
        "test_fused_pairs.py::test_what_asks_for_the_arithmetic_of_float32_has_its_bytes",
        "high",
    ),
    Mutant(
        "G5",
        "a scale that shows subnormal numbers is left to dot instructions",
        CPP + "targets.cpp",
        "kMostScale = 1e6;",
        "kMostScale = 1e9;",
        "test_fused_pairs.py::test_what_asks_for_the_arithmetic_of_float32_has_its_bytes",
        "scale",
    ),
    Mutant(
        "G1",
        "what takes part in nothing goes back through the steps of a score as it is",
        "compute/dot_of_rows.py",
        "np.where((arrived != 0).any(",
        "np.where((arrived == arrived).any(",
        "test_dot_of_rows.py::test_what_is_hidden_is_absent_from_made_rows_and_their_gradients",
        "Cosine",
    ),
    Mutant(
        "G3",
        "rows of a score that leave the range of float32 stay infinite",
        "compute/dot_of_rows.py",
        "dict.fromkeys((request.accumulator, np.dtype(np.float64)))",
        "(request.accumulator,)",
        "test_dot_of_rows.py::test_rows_beyond_float32_are_computed_in_float64",
        "float32",
    ),
    Mutant(
        "G9",
        "a parameter of both sides of a score has the gradient of one of them",
        "compute/dot_of_rows.py",
        "made[name] + one if name in made else one",
        "one",
        "test_dot_of_rows.py::test_kernels_agree_on_leading_axes_pieces_of_rows_and_no_rows_at_all",
        "gated",
    ),
    Mutant(
        "G4",
        "an angle of 0 brings a NaN from the other number of a pair",
        CPP + "rotate.hpp",
        "sine == Vec<double>{} ? Vec<double>{} : a * sine",
        "a * sine",
        "test_positions.py::test_every_target_and_numpy_turn_rows_to_the_same_bytes",
        "float32 and False",
    ),
    Mutant(
        "G4",
        "turned rows of bfloat16 are rounded twice",
        CPP + "rotate.hpp",
        "if (K != Kind::bfloat16 || !some_halfway(near)) return near;",
        "return near;",
        "test_positions.py::test_numbers_beside_the_middle_of_two_are_rounded_once",
        "bfloat16",
    ),
    Mutant(
        "G8",
        "the fast path turns pairs side by side as if they were halves",
        CPP + "fast_path.hpp",
        "to.interleaved = PyTuple_GetItem(given, 2) == Py_True;",
        "to.interleaved = false;",
        "test_fused_fast_path.py::test_a_fast_call_with_positions_has_the_bytes_of_the_general_way",
        "float32 and side",
    ),
    Mutant(
        "G8",
        "keys that a batch shares have the angles of its first element",
        CPP + "driver.cpp",
        "turns_ && turns_->key.apart ? b : 0",
        "0",
        "test_positions.py::test_keys_that_a_batch_shares_are_turned_to_the_places_of_each_element",
        "",
    ),
    Mutant(
        "G8",
        "every piece of a call has the angles of the first rows",
        CPP + "driver.cpp",
        "piece.g * group + r / q.L, i, i + end - r,",
        "piece.g * group + r / q.L, 0, end - r,",
        "test_positions.py::test_rows_turned_during_a_call_give_the_bytes_of_turned_rows",
        "float32 and 300",
    ),
    Mutant(
        "G8",
        "a token after others has the angle of the first one",
        "rules/rotary.py",
        "return cosines[places.start : places.stop], sines[places.start : places.stop]",
        "return cosines[: len(places)], sines[: len(places)]",
        "test_positions.py::"
        "test_a_cache_with_positions_has_the_bytes_of_one_call_also_after_its_file",
        "halves",
    ),
    Mutant(
        "G8",
        "over dask, a part forgets what earlier keys left of its rows",
        "interop/dask.py",
        "tiles.carry(request, before, apart=apart)",
        "tiles.carry(request, None, apart=apart)",
        "test_dask.py::test_the_bytes_are_those_of_one_call",
        "plain",
    ),
    Mutant(
        "G8",
        "over dask, parts begin where the chunks of an array do",
        "interop/dask_arrays.py",
        "round(end / CHUNK) * CHUNK",
        "end",
        "test_dask.py::test_the_bytes_are_those_of_one_call",
        "plain",
    ),
    Mutant(
        "G8",
        "over dask, a rule counts the keys of every part from the first of them",
        "compute/tiles.py",
        "as_places(of_rows - place.keys.start)",
        "as_places(of_rows)",
        "test_dask.py::test_the_bytes_are_those_of_one_call",
        "causal",
    ),
    Mutant(
        "G8",
        "over dask, padding begins anew in every part of the keys",
        "compute/tiles.py",
        "rule.lengths[within(rule.lengths.shape, batch)] - keys.start",
        "rule.lengths[within(rule.lengths.shape, batch)]",
        "test_dask.py::test_the_bytes_are_those_of_one_call",
        "lengths",
    ),
    Mutant(
        "G8",
        "over dask, rows that left their range are not made again",
        "compute/tiles.py",
        "    if rows.any():\n",
        "    if False:\n",
        "test_dask.py::test_rows_that_leave_their_range_are_made_again",
        "",
    ),
    Mutant(
        "G5",
        "keys are turned as if they began at position 1",
        "compute/positioned.py",
        "    return range(rows)\n",
        "    return range(1, rows + 1)\n",
        "test_positions.py::test_output_and_weights_are_those_of_plain_loops",
        "halves",
    ),
    Mutant(
        "G5",
        "gradients are turned on instead of back",
        "compute/positioned.py",
        "return self._turned(arrays, dtypes, threads, back=True)",
        "return self._turned(arrays, dtypes, threads, back=False)",
        "test_positions.py::test_every_gradient_is_the_slope_of_the_output",
        "halves",
    ),
    Mutant(
        "G3",
        "rows made for a score become infinite beyond float32",
        "compute/dot_of_rows.py",
        "        if fits:\n            break\n",
        "        break\n",
        "test_dot_of_rows.py::test_rows_beyond_float32_are_computed_in_float64",
        "",
    ),
    Mutant(
        "G1",
        "a hidden NaN reaches the gradients of what rows are made of",
        "compute/dot_of_rows.py",
        "    array = np.where((arrived != 0).any(axis=-1, keepdims=True), array, "
        "np.zeros((), array.dtype))\n",
        "",
        "test_dot_of_rows.py::test_what_is_hidden_is_absent_from_made_rows_and_their_gradients",
        "",
    ),
]


class Outcome(NamedTuple):
    """What a test had to say."""

    passed: list[str]  # names of cases
    failed: dict[str, str]  # names of cases, and the first line of what they say
    ended: str = ""  # how pytest itself ended, where it did not report


def main(arguments: list[str]) -> int:
    tier = [one for one in arguments if one == "--full"]
    wanted = [one for one in arguments if one not in tier]
    chosen = [one for one in MUTANTS if not wanted or one.promise in wanted]
    rows, trouble, later = [], [], []
    with tempfile.TemporaryDirectory(prefix="regard-mutants-") as folder:
        copy = Copy(Path(folder), tier)
        best = {}  # the target on which a fault must be noticed
        for test, cases in dict.fromkeys((one.test, one.cases) for one in chosen):
            outcome = copy.outcome(test, cases)
            best[test, cases] = (targets_of(outcome.passed, copy.targets) or copy.targets)[0]
            print(f"as it is: {test} [{cases}]: {len(outcome.passed)} passed", flush=True)
            if outcome.failed or outcome.ended or (tier and not outcome.passed):
                trouble.append(f"{test} [{cases}] does not pass as it is: {outcome}")
            elif not outcome.passed:
                later += [one for one in chosen if (one.test, one.cases) == (test, cases)]
        chosen = [one for one in chosen if one not in later]
        for one in chosen if not trouble else []:
            with copy.changed(one, best[one.test, one.cases]) as fits:
                outcome = copy.outcome(one.test, one.cases) if fits else Outcome([], {})
            row = row_of(one, outcome, copy.targets)
            print(row, flush=True)
            rows.append(row)
            if not fits:
                trouble.append(f"{one.promise}: {one.old!r} is not there once, or does not compile")
            elif not noticed(outcome, copy.targets):
                trouble.append(f"{one.promise}: nobody noticed that {one.fault}")
    print("\n| promise | change | test that fails | on | fails with |\n|---|---|---|---|---|")
    print("\n".join(rows))
    for one in later:
        print(f"\nFor --full: {one.promise}: {one.fault}")
    print("\n" + ("\n".join(trouble) or f"All {len(rows)} faults were noticed."))
    return bool(trouble)


def place_of(test: str) -> str:
    """What pytest calls the test, from the name of its file: tests/compute/test_….py::test_…."""
    name, _, function = test.partition("::")
    (path,) = (ROOT / "tests").rglob(name)
    return f"{path.relative_to(ROOT).as_posix()}::{function}"


def noticed(outcome: Outcome, targets: list[str]) -> bool:
    """Whether the test fails, and on the best CPU target of those that its cases are about."""
    if outcome.ended:
        return True
    about = targets_of([*outcome.passed, *outcome.failed], targets)
    failing = targets_of(list(outcome.failed), targets)
    return bool(outcome.failed) and about[:1] == failing[:1]


def targets_of(cases: list[str], targets: list[str]) -> list[str]:
    return [target for target in targets if any(target in case for case in cases)]


def row_of(one: Mutant, outcome: Outcome, targets: list[str]) -> str:
    """The line of the table."""
    place = ", ".join(targets_of(list(outcome.failed), targets)) or "–"
    said = outcome.ended or next(iter(outcome.failed.values()), "**unnoticed**")
    return f"| {one.promise} | {one.fault} | `{one.test}` | {place} | {said} |"


class Copy:
    """The repository in a folder of its own, with the native module built."""

    def __init__(self, folder: Path, tier: list[str]) -> None:
        self.tier = tier  # options of pytest
        self.tree, self.build, self.whole = (folder / n for n in ("tree", "build", "whole"))
        shutil.copytree(ROOT, self.tree, ignore=LEFT_OUT)
        command = ["cmake", "-S", str(self.tree), "-B", str(self.build), "-G", "Ninja"]
        command += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
        command += ["-DREGARD_OPTIMIZE=-O1"]  # the same bytes, compiled in less time
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if not self.compiles():
            raise SystemExit("the native module does not build as it is")
        shutil.copytree(self.build, self.whole)
        self.environment = {name: x for name, x in os.environ.items() if name[:7] != "REGARD_"}
        self.environment |= {
            "PYTHONPATH": str(self.tree / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",  # or a change within one second might not be seen
            "REGARD_REQUIRE": "fused,compiler",
        }
        ask = "from regard.compute.native import targets as t; print(*(x for x in t() if t()[x]))"
        self.targets = self.python("-c", ask).stdout.split()

    def compiles(self) -> bool:
        """Build whatever changed, and put the module where Python finds it."""
        done = subprocess.run(["ninja", "-C", self.build, "-j2"], capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-3000:])
            return False
        for module in self.build.glob("_fused*.so"):
            shutil.copy2(module, self.tree / "src/regard")
        return True

    @contextmanager
    def changed(self, one: Mutant, target: str) -> Iterator[bool]:
        """With this fault in the copy meanwhile; False if it cannot be put there or compiled."""
        path = self.tree / "src/regard" / one.file
        text, times = path.read_text("utf-8"), path.stat()
        if text.count(one.old) != 1:
            yield False
            return
        path.write_text(text.replace(one.old, one.new), "utf-8")
        # With the time of before nothing is out of date. What includes the file is compiled because
        # its object is gone: of the kernel that for `target` alone.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        for compiled in self.compiled_from(path):
            if compiled.name == f"target_{target}.cpp.o" or not compiled.name.startswith("target_"):
                compiled.unlink()
        yield self.compiles()
        path.write_text(text, "utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        shutil.rmtree(self.build)
        shutil.copytree(self.whole, self.build)
        assert self.compiles()

    def compiled_from(self, path: Path) -> Iterator[Path]:
        """The objects that were compiled from this file or a file that includes it."""
        command = ["ninja", "-C", self.build, "-t", "deps"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for one in said.split("\n\n"):
            name, _, files = one.partition(": ")
            if str(path) in files.split():
                yield self.build / name.strip()

    def outcome(self, test: str, cases: str) -> Outcome:
        report = self.tree / "report.xml"
        report.unlink(missing_ok=True)
        options = ["-q", "-n", "0", "--tb=short", "-p", "no:cacheprovider", *self.tier]
        options += [f"--junitxml={report}"]
        try:
            done = self.python("-m", "pytest", place_of(test), "-k", cases, *options)
        except subprocess.TimeoutExpired:
            return Outcome([], {}, "no end within the time")
        if done.returncode < 0:
            return Outcome([], {}, f"the process ends by signal {-done.returncode}")
        passed, failed = [], {}
        for case in xml.parse(report).iter("testcase"):
            name = case.get("name", "")
            troubles = case.findall("failure") + case.findall("error")
            if troubles:
                failed[name] = in_short(troubles[0].get("message", ""))
            elif case.find("skipped") is None:
                passed.append(name)
        return Outcome(passed, failed)

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.tree,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )


def in_short(message: str) -> str:
    """What a failing test says, on one line; of what a process printed, its error alone."""
    lines = message.removeprefix("AssertionError: ").splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if re.match(r"Fatal Python|terminate called|\w+Error", line)]
    words = " ".join(errors[-1:] or lines).replace("|", "\\|")
    return words if len(words) <= 100 else words[:99] + "…"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
