"""The report and the tables of README.md and docs/bench.md, from the committed results.

python -m bench.report            # docs/report/: index.html and its figures; README.md tables
python -m bench.report --check    # exit 1 if any of them differs from what the JSON says
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from html import escape
from typing import Any

from bench import facts, svg
from bench.machine import MACHINES, floor_us

PAGE = facts.ROOT / "docs" / "report"
README = facts.ROOT / "README.md"
METHOD = facts.ROOT / "docs" / "bench.md"
CHIPS = ("v5e", "v6e")
OURS = "ours"
# The table of the README: what a reader may know the shapes from.
README_CASES = {
    "R1": "Qwen3-30B-A3B, EP8",
    "R3": "Qwen3-30B-A3B",
    "R6": "gpt-oss",
    "R7": "Mixtral",
    "R8": "of R3",
    "R11": "decode",
    "R10T.int8": "R1 with int8 weights",
    "R10T.e4m3": "R1 with float8_e4m3fn weights",
    "R10T.int4": "R1 with int4 weights",
    "E1.1": "Qwen3-30B-A3B, EP8 rank",
    "E1.8": "",
    "E1.64": "",
    "E1.64.int8": "E1.64 with int8 weights",
    "E1.64.int4": "E1.64 with int4 weights",
    "E1.512": "",
    "E2.64": "",
    "E2.4096": "",
    "E3.gemma4_26b_ep8.bf16": "Gemma 4 26B-A4B, EP8 rank",
    "E3.gpt_oss_20b_ep8.bf16": "gpt-oss-20b, EP8 rank",
    "E3.mixtral_8x7b_ep8.int8": "Mixtral 8x7B, EP8 rank",
    "E3.deepseek_v3_ep8.int8": "DeepSeek-V3, EP8 rank",
    "A1": "",
    "A2b": "",
    "A3": "Stable Diffusion 3.5",
    "A4": "Gemma",
    "A5": "decode",
    "A6": "gpt-oss",
    "A7": "four documents in a row",
    "A8": "",
    "N1": "",
    "N3": "per head",
    "N5": "backward of N1",
    "Q1": "",
    "Q3": "",
}
KERNELS = {
    "ragged-dot-tpu": ("ragged_dot", "weight_grad", "moe_experts"),
    "attention-tpu": (
        "flash_attention",
        "flash_attention_heads_first",
        "flash_attention_backward",
    ),
    "rmsnorm-tpu": ("rms_norm", "rms_norm_backward", "add_rms_norm", "rms_norm_gated"),
    "rotary-tpu": ("apply_rotary", "qk_norm_rotary"),
}
# Cases of the grouped matmul and the experts layer that name no peers: quantised weights, models.
MORE = "ragged-dot-tpu-more"
# Arithmetic for each byte that is moved, counted off the formulas in bfloat16. It only places
# elementwise work in the roofline plot: its floor counts bytes alone.
ELEMENTWISE_FLOPS_PER_BYTE = {
    "rms_norm": 4 / 4,  # square, add, scale, weight; one element read, one written
    "add_rms_norm": 5 / 8,
    "rms_norm_gated": 9 / 6,
    "rms_norm_backward": 11 / 6,
    "apply_rotary": 3 / 4,
    "qk_norm_rotary": 7 / 4,
}

Row = dict[str, Any]


def load_rows() -> dict[tuple[str, str], dict[str, Row]]:
    """(case, chip) -> implementation -> row, without what did not compile."""
    table: dict[tuple[str, str], dict[str, Row]] = {}
    for row in facts.load("static.json")["rows"]:
        if "error" not in row:
            table.setdefault((row["case"], row["chip"]), {})[row["implementation"]] = row
    return table


def best_peer(rows: dict[str, Row]) -> Row | None:
    peers = [row for name, row in rows.items() if name != OURS]
    return min(peers, key=lambda row: row["us"], default=None)


def cell(rows: dict[str, Row] | None) -> str:
    """Multiples of the floor: ours, and in brackets the best peer's."""
    if not rows or OURS not in rows:
        return ""
    peer = best_peer(rows)
    bracket = f" ({_multiple(peer['ratio'])}{_mark(peer)})" if peer else ""
    return f"{_multiple(rows[OURS]['ratio'])}{_mark(rows[OURS])}{bracket}"


def _multiple(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 5 else f"{ratio:.1f}"


def _mark(row: Row) -> str:
    """A star where more than 2 % of the program has no code to read."""
    return "*" if sum(row["not_dumped"].values()) > 0.02 * row["us"] else ""


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *lines))


def speed_table(descriptions: dict[str, str]) -> str:
    table = load_rows()
    lines = []
    for case, model in README_CASES.items():
        what = descriptions[case] + (f" ({model})" if model else "")
        lines.append([case, what, *(cell(table.get((case, chip))) for chip in CHIPS)])
    header = ["case", "what", *(f"{chip}, static" for chip in CHIPS)]
    return markdown(header, lines)


def overhead_rows() -> tuple[list[str], list[list[str]]]:
    """Header and lines."""
    columns = {
        "op": "op",
        "call_us": "call, us",
        "reference_us": "its reference alone, us",
        "wrapper_us": "wrapper, us",
        "dispatcher_us": "of it torch, us",
        "inference_wrapper_us": "in inference_mode, us",
        "plain_torch_us": "plain torch, us",
    }
    rows = facts.load("overhead.json")["wrappers"]
    return list(columns.values()), [[str(row[column]) for column in columns] for row in rows]


def _replace(text: str, name: str, content: str) -> str:
    """Puts `content` between the markers `name` of a Markdown file."""
    begin, end = f"<!-- {name}: made by `make report` -->", f"<!-- end of {name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"expected the markers {begin} and {end}")
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n\n{content}\n\n{end}{rest.split(end, 1)[1]}"


def error_tables() -> str:
    """The static estimates against published measurements, by kind of kernel, and another tool."""
    from bench import cross_check

    published, cross = facts.load("published.json"), facts.load(cross_check.RESULT)["rows"]
    groups: dict[tuple[str, str], list[float]] = {}
    for row in published["rows"]:
        kind = row["what"].split(",")[0]
        ratio = row["static_us"] / row["measured_us"]
        groups.setdefault((row["chip"], kind), []).append(ratio)
    lines = []
    for (chip, kind), ratios in groups.items():
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        errors = sorted(abs(ratio - 1) for ratio in ratios)
        cells = [str(len(ratios)), f"{mean:.3f}", f"{statistics.median(errors):.1%}"]
        lines.append([f"{kind}, {chip}", *cells, f"{errors[-1]:.0%}"])
    header = ["published measurements of", "number", "static / measured, geometric mean"]
    table = markdown([*header, "median error", "largest"], lines)
    source = f"Source of the measurements: {published['source']}; every n-th entry is taken."
    listed = "\n".join(f"- {reason}" for reason in cross_check.reasons(cross))
    return f"{published['summary']} {source}\n\n{table}\n\n{cross_check.summary(cross)}\n\n{listed}"


# --- figures ------------------------------------------------------------------------------------


def group_of(op: str) -> int:
    return next(i for i, ops in enumerate(KERNELS.values()) if op in ops)


def bars_figure(chip: str, kernel: str, cases: list[str]) -> str:
    table = load_rows()
    rows = []
    for case in cases:
        found = table.get((case, chip), {})
        if OURS not in found:
            continue
        ours, peer = found[OURS], best_peer(found)
        notes = (f"{ours['us']:,.1f} us", f"{peer['implementation']}{_mark(peer)}" if peer else "")
        values = (ours["ratio"], peer["ratio"] if peer else None)
        rows.append(svg.Bar(f"{case}  ({ours['bound']})", values, notes))
    limit = min(4.0, 1.05 * max(value for row in rows for value in row.values if value))
    return svg.bars(
        f"{kernel} on {chip}: time as a multiple of the floor",
        "STATIC ESTIMATES of compiled programs, not measured; shorter is better. In brackets what "
        "bounds the floor.",
        ("ours", "best peer"),
        rows,
        max(limit, 1.5),
    )


def roofline_figure(chip: str, ops: dict[str, str]) -> str:
    machine = MACHINES[chip]
    points = []
    for (case, on), found in load_rows().items():
        if on != chip or OURS not in found or ops.get(case, MORE) == MORE:
            continue
        row = found[OURS]
        flops = row["flops"] or ELEMENTWISE_FLOPS_PER_BYTE[ops[case]] * row["bytes"]
        point = (flops / row["bytes"], flops / row["us"] * 1e6)
        points.append(svg.Point(case, group_of(ops[case]), *point))
    peak, mxu = machine.chip.bf16_flops, machine.chip.mxu_size
    roofs = [("bfloat16 peak", peak)]
    for head in (128, 64):  # of forward attention, half of whose work adds up over the head
        if head < mxu:
            us, _ = floor_us(chip, peak, 0.0, 0.0, head, 0.5)
            roofs.append((f"head of {head}", 1e6 * peak / us))
    share = machine.read_share
    bandwidth = machine.chip.hbm_bytes_per_s * share
    return svg.roofline(
        f"Roofline of {chip}: all cases",
        "STATIC ESTIMATES of compiled programs, not measured. Norms and rotary: the arithmetic of "
        "their formulas.",
        roofs,
        (f"HBM reads, {share:.0%} of {machine.chip.hbm_bytes_per_s / 1e9:.0f} GB/s", bandwidth),
        tuple(KERNELS),
        points,
    )


def html_table(header: list[str], lines: list[list[str]]) -> str:
    def row(tag: str, cells: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "\n".join(row("td", line) for line in lines)
    return f"<table>\n{row('th', header)}\n{body}\n</table>"


def all_cases_table(descriptions: dict[str, str]) -> str:
    header = ["case", "what", "chip", "implementation", "time, us (static)", "x floor", "floor, us"]
    header += ["bound", "HBM MB", "fewest MB", "GFLOP", "schedule cycles", "VMEM MiB"]
    header += ["spills / fills"]
    lines = []
    for (case, chip), found in load_rows().items():
        peer = best_peer(found)
        for row in (found.get(OURS), peer):
            if row is None:
                continue
            lines.append(
                [
                    case,
                    descriptions.get(case, ""),
                    chip,
                    row["implementation"] + _mark(row),
                    f"{row['us']:,.2f}",
                    f"{row['ratio']:.2f}",
                    f"{row['floor_us']:,.2f}",
                    row["bound"],
                    f"{row['hbm_bytes'] / 1e6:,.1f}",
                    f"{row['bytes'] / 1e6:,.1f}",
                    f"{row['flops'] / 1e9:,.1f}",
                    f"{row['schedule_cycles']:,}",
                    f"{row['vmem_bytes'] / 2**20:.1f}" if row["vmem_bytes"] else "",
                    f"{row['spills']} / {row['fills']}",
                ]
            )
    return html_table(header, lines)


_STYLE = """
body { font: 14px/1.5 Helvetica, Arial, sans-serif; max-width: 1180px; margin: 24px auto; }
table { border-collapse: collapse; font-size: 12px; }
th, td { border-bottom: 1px solid #ddd; padding: 3px 8px; text-align: left; }
td:nth-child(n+5) { text-align: right; }
figure { margin: 24px 0; }
""".strip()


def overhead_html() -> str:
    result = facts.load("overhead.json")
    targets = result["targets"]
    wrappers = html_table(*overhead_rows())
    loading = html_table(
        [
            "kernel",
            "get_kernel, s",
            "import torch, s",
            "import kernels, s",
            "of jax, torch_tpu, tokamax",
        ],
        [
            [
                *(str(value) for value in list(row.values())[:4]),
                ", ".join(row["also_imports"]) or "none",
            ]
            for row in result["loading"]
        ],
    )
    return (
        f"<p>MEASURED on {escape(result['device'])}, commit {result['commit']}, {result['date']}. "
        f"Targets: wrapper under {targets['wrapper_us']:g} us, loading under {targets['load_s']:g} "
        "s. The wrapper is what the call costs when its operator does nothing; the dispatcher and "
        "autograd of torch are the larger part, which inference_mode shortens.</p>\n"
        f"{wrappers}\n"
        f"<p></p>\n{loading}"
    )


def device_html() -> str:
    """What bench.device measured, where somebody ran it on a TPU and committed the result."""
    parts = []
    for chip in CHIPS:
        if not (result := facts.load(f"device_{chip}.json")):
            parts.append(f"<p>{chip}: nobody has run <code>make bench</code> on one yet.</p>")
            continue
        header = ["case", "pass", "implementation", "median, us", "quartiles, us", "x floor"]
        lines = [
            [
                *(row[key] for key in ("case", "pass", "implementation")),
                str(row.get("median_us", row.get("error"))),
                f"{row.get('p25_us', '')} to {row.get('p75_us', '')}",
                str(row.get("times_floor", "")),
            ]
            for row in result["rows"]
        ]
        parts.append(
            f"<p>MEASURED on {chip}, commit {result['commit']}, {result['date']}.</p>\n"
            + html_table(header, lines)
        )
    return "\n".join(parts)


def errors_html() -> str:
    from bench import cross_check

    published, cross = facts.load("published.json"), facts.load(cross_check.RESULT)["rows"]
    header = ["what", "chip", "measured, us (published)", "static, us", "static / measured"]
    lines = [
        [
            row["what"],
            row["chip"],
            f"{row['measured_us']:,.1f}",
            f"{row['static_us']:,.1f}",
            f"{row['static_us'] / row['measured_us']:.2f}",
        ]
        for row in published["rows"]
    ]
    texts = [published["summary"], cross_check.summary(cross), *cross_check.reasons(cross)]
    paragraphs = "\n".join(f"<p>{escape(text)}</p>" for text in texts)
    return f"{paragraphs}\n{html_table(header, lines)}"


def pages(descriptions: dict[str, str], ops: dict[str, str]) -> dict[str, str]:
    """Every file of docs/report/ by name."""
    static = facts.load("static.json")
    files = {f"roofline_{chip}.svg": roofline_figure(chip, ops) for chip in CHIPS}
    groups = {**KERNELS, MORE: (MORE,)}
    for kernel, members in groups.items():
        cases = [case for case, op in ops.items() if op in members]
        for chip in CHIPS:
            if any(OURS in load_rows().get((case, chip), {}) for case in cases):
                files[f"{kernel}_{chip}.svg"] = bars_figure(chip, kernel, cases)
    commits = ", ".join(sorted({row["commit"] for row in static["rows"]}))
    versions = ", ".join(f"{name} {value}" for name, value in static["versions"].items())
    figures = {name: f"<figure>\n{content}</figure>" for name, content in files.items()}
    body = [
        "<h1>Speed of the kernels on v5e and v6e</h1>",
        "<p>Times are STATIC ESTIMATES: the TPU compiler's final code, executed by a model of the "
        "machine; nothing here was measured on a TPU. The floor is the larger of FLOPs at the "
        "bfloat16 peak and bytes, each moved once, at the bandwidth that large transfers reach. "
        "A star: more than 2 % of the program has no code to read and counts as the memory traffic "
        "of its results. See docs/bench.md for the method and its error.</p>",
        f"<p>{escape(versions)}; commit {escape(commits)} (a plus: with local changes).</p>",
        *(figures[f"roofline_{chip}.svg"] for chip in CHIPS),
    ]
    for kernel in groups:
        body.append(f"<h2>{kernel}</h2>")
        names = [f"{kernel}_{chip}.svg" for chip in CHIPS]
        body += [figures[name] for name in names if name in figures]
    body += ["<h2>All cases, ours and the best peer (static)</h2>", all_cases_table(descriptions)]
    body += ["<h2>Measured on a TPU</h2>", device_html()]
    body += ["<h2>Overhead of a call on a CPU (measured)</h2>", overhead_html()]
    body += ["<h2>Error of the static estimates</h2>", errors_html()]
    files["index.html"] = (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f"<title>Speed of the kernels</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )
    return files


def wanted_files() -> dict[Any, str]:
    """Path -> content of everything that is made from the results."""
    from bench import cases, cost_cases

    ops = {name: case[2].get("op", MORE) for name, case in cost_cases.CASES.items()}
    descriptions = {name: cases.describe(name) for name in cost_cases.CASES}
    files = {PAGE / name: content for name, content in pages(descriptions, ops).items()}
    readme = _replace(README.read_text(), "speed", speed_table(descriptions))
    files[README] = _replace(readme, "overhead", markdown(*overhead_rows()))
    files[METHOD] = _replace(METHOD.read_text(), "errors", error_tables())
    return files


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    stale = []
    for path, content in wanted_files().items():
        if path.exists() and path.read_text() == content:
            continue
        stale.append(path.relative_to(facts.ROOT))
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    for path in stale:
        print(f"{path}: {'differs from the results, run make report' if options.check else 'made'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
