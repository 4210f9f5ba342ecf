"""The tables of docs/performance.md, in Markdown, from what `regard bench --json FILE` saved.

regard bench --grid full --json results.json
python benchmarks/table.py results.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TITLES = {
    "small": "Small calls",
    "full": "Every key visible",
    "causal": "Causal",
    "masks": "Masks",
    "decode": "One query per head against a long cache",
    "types": "Other number types",
    "widths": "Values wider or narrower than keys",
    "odd": "Sizes that fit no tile",
    "long": "Long",
    "spread": "Larger queries",
    "positions": "Positions",
    "tails": "One key more than a multiple of 16",
    "range": "Rows that leave their range",
    "forward": "Forward pass",
    "backward": "Backward pass",
    "both": "Forward and backward pass",
}


def main() -> None:
    report = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    print("\n".join(markdown(report)))


def markdown(report: dict[str, Any]) -> list[str]:
    lines = [*machine(report), ""]
    for group in dict.fromkeys(case["group"] for case in report["cases"]):
        cases = [case for case in report["cases"] if case["group"] == group]
        lines += [f"**{TITLES.get(group, group)}**", "", *table(cases), ""]
    return lines + summary(report)


def machine(report: dict[str, Any]) -> list[str]:
    about, limits = report["machine"], report["limits"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"{about['cpu']}, {about['threads']} of {about['cpus']} CPUs, target {about['target']}, "
        f"{about['system']}, Python {about['python']}; {versions}, {about['blas']}.",
    ]
    if limits is not None:
        best = max(limits["peaks"], key=lambda peak: peak["float32"])
        per_cycle = best["float32"] / (limits["threads"] * limits["clock"] * best["lanes"] * 2)
        most = max(peak["bfloat16"] for peak in limits["peaks"]) / 1e9
        pairs = f", {most:.0f} in bfloat16" if most else ""
        lines.append(
            f"Multiply-adds: {best['float32'] / 1e9:.0f} GF/s at most ({limits['threads']} threads "
            f"× {limits['clock'] / 1e9:.2f} GHz × {best['lanes']} lanes × 2 × {per_cycle:.2f} per "
            f"cycle), {best['float64'] / 1e9:.0f} in float64{pairs}. "
            f"Reading: {limits['read'] / 1e9:.1f} GB/s at most."
        )
    return lines


def table(cases: list[dict[str, Any]]) -> list[str]:
    sides = list(cases[0]["sides"])
    last = "of the limit"
    if any(case["cost"] is not None for case in cases):
        masked = cases[0]["group"] == "masks"
        last = "× its time without mask" if masked else "× the plain call, per score"
    units = {case["unit"] for case in cases}
    shape = "B,H,L,S,D" + (f" ({units.pop()})" if len(units) == 1 else "")
    lines = [
        f"| {shape} | {' | '.join(sides)} | × best peer | {last} |",
        f"|---|{'---:|' * (len(sides) + 2)}",
    ]
    for case in cases:
        timed = [side["seconds"] for side in case["sides"].values() if side["seconds"]]
        cells = [cell(case["sides"][side], min(timed, default=0), case) for side in sides]
        ratio = "–" if case["ratio"] is None else f"{case['ratio']:.2f}"
        beside = "–"
        if case["cost"] is not None:
            beside = f"{case['cost']:.2f}"
        elif case["share"] is not None:
            beside = f"{case['share']:.0%}"
        lines.append(f"| {case['name']} | {' | '.join(cells)} | {ratio} | {beside} |")
    return lines


def cell(side: dict[str, Any], best: float, case: dict[str, Any]) -> str:
    half = case["dtype"] in ("float16", "bfloat16")
    error = f" ({side['rms']:.2f})" if half and side["rms"] is not None else ""
    if side["seconds"] is None:
        return f"wrong{error}" if (side["reason"] or "").startswith("wrong") else "–"
    value = side["speed"]
    text = f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return (f"**{text}**" if side["seconds"] == best else text) + error


def summary(report: dict[str, Any]) -> list[str]:
    found = report["summary"]
    if found["mean_ratio"] is None:
        return []
    groups = ", ".join(
        f"{name} {ratio:.2f}" for name, ratio in found["mean_ratio_by_group"].items() if ratio
    )
    worst = found["worst"]
    return [
        f"Geometric mean of the ratios to the best peer: {found['mean_ratio']:.2f} ({groups}). "
        f"The worst: {worst['ratio']:.2f} ({worst['case']}).",
    ]


if __name__ == "__main__":
    main()
