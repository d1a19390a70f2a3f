"""The static estimate against published measurements of real chips.

    python -m bench.published        # results/published.json, what is missing there; ten minutes

tokamax ships with its wheel what it measured while it tuned its kernels: shapes, configuration and
times on TPU v5e and v6e. Each entry chosen here is compiled as it was run and estimated. The choice
is every n-th entry of a file, in its order, so that nobody picked the ones that fit.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import facts
from bench.dumps import estimate_cases

RESULT = "published.json"
_FOLDERS = {"v5e": "tpu_v5_lite", "v6e": "tpu_v6_lite"}
# (chip, file, every n-th entry)
CHOICE = (
    ("v5e", "pallas_mosaic_tpu_ragged_dot", 1),
    ("v6e", "pallas_mosaic_tpu_ragged_dot", 6),
    ("v6e", "pallas_mosaic_tpu_v2_ragged_dot", 4),
    ("v6e", "pallas_mosaic_tpu_flash_attention", 5),
)
SHORTEST_MS = 0.05


def entries(chip: str, file: str) -> list[tuple[dict, dict, float]]:
    """(arguments, configuration, measured median in ms) of plain bfloat16 forward calls."""
    root = Path(importlib.util.find_spec("tokamax").submodule_search_locations[0])
    path = root / "data" / "autotuning" / _FOLDERS[chip] / f"{file}.json"
    found = []
    for key, configurations in json.loads(path.read_text()).items():
        arguments = json.loads(key)
        if arguments["return_residuals"] or not _is_plain(arguments):
            continue
        timed = {
            name: statistics.median(timing["evaluation_times_ms"])
            for name, timing in configurations.items()
            if timing.get("evaluation_times_ms")
        }
        if timed:
            best = min(timed, key=timed.get)
            if timed[best] >= SHORTEST_MS:
                found.append((arguments, json.loads(best), timed[best]))
    return found


def _is_plain(arguments: dict) -> bool:
    tensors = [arguments[name] for name in ("lhs", "rhs", "q", "k", "v") if name in arguments]
    if not all(isinstance(t, str) and t.startswith("bf16[") for t in tensors):
        return False
    if "q" in arguments:
        mask = arguments["mask"] or {}
        causal = mask.get("causal_mask") or {"offset": 0, "window_size": None}
        is_simple = mask.get("bool_mask") is None and causal == {"offset": 0, "window_size": None}
        return is_simple and arguments["bias"] is None and arguments["logits_soft_cap"] is None
    return arguments.get("activation") is None and arguments.get("group_offset") is None


def names() -> list[str]:
    """published:chip:file:index of every chosen entry."""
    return [
        f"published:{chip}:{file}:{index}"
        for chip, file, step in CHOICE
        for index in range(0, len(entries(chip, file)), step)
    ]


def find(name: str) -> tuple:
    """(fn, args, counts) of one of `names`."""
    _, chip, file, index = name.split(":")
    arguments, configuration, _ = entries(chip, file)[int(index)]
    make = _attention if "flash" in file else _ragged_dot
    return make(arguments, configuration, file)


def _spec(text: str) -> jax.ShapeDtypeStruct:
    shape = re.match(r"bf16\[([\d,]+)\]", text)[1]
    return jax.ShapeDtypeStruct([int(d) for d in shape.split(",")], jnp.bfloat16)


def _ragged_dot(arguments: dict, configuration: dict, file: str) -> tuple:
    lhs, rhs = _spec(arguments["lhs"]), _spec(arguments["rhs"])
    sizes = arguments["group_sizes"]
    if isinstance(sizes, dict):  # a total: tokamax times the sizes that it draws for it
        from tokamax._src.ops.ragged_dot.base import generate_group_sizes

        sizes = generate_group_sizes(m=sizes["total_size"], num_groups=sizes["num_groups"])
    numbers = arguments["ragged_dot_dimension_numbers"]
    dims, ragged, group = (
        numbers[key]
        for key in ("dot_dimension_numbers", "lhs_ragged_dimensions", "rhs_group_dimensions")
    )
    run = functools.partial(
        _run_ragged_dot, numbers=(dims, ragged, group), configuration=configuration, file=file
    )
    args = (lhs, rhs, np.asarray(sizes, np.int32))
    return run, args, {"flops": 0.0, "bytes": 0.0}


def _run_ragged_dot(lhs, rhs, sizes, *, numbers, configuration, file):
    if "v2" in file:
        from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_v2 as module

        op = module.PallasMosaicTpuV2RaggedDot(config=module.Config(**configuration))
    else:
        from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu as module

        op = module.PallasMosaicTpuRaggedDot(config=module.Config(**configuration))
    dims = jax.lax.RaggedDotDimensionNumbers(*numbers)
    return op(lhs, rhs, group_sizes=sizes, ragged_dot_dimension_numbers=dims)


def _attention(arguments: dict, configuration: dict, file: str) -> tuple:
    args = tuple(_spec(arguments[name]) for name in "qkv")
    is_causal = bool((arguments["mask"] or {}).get("causal_mask"))
    run = functools.partial(_run_attention, is_causal=is_causal, configuration=configuration)
    return run, args, {"flops": 0.0, "bytes": 0.0}


def _run_attention(q, k, v, *, is_causal, configuration):
    from tokamax._src.ops.attention import pallas_mosaic_tpu as module
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel

    layouts = {
        name: splash_attention_kernel.QKVLayout(value)
        for name, value in configuration.items()
        if name.endswith("_layout")
    }
    config = module.Config(**{**configuration, **layouts})
    op = module.PallasMosaicTpuFlashAttention(config=config)
    return op(q, k, v, is_causal=is_causal)


def describe(name: str) -> str:
    _, chip, file, index = name.split(":")
    arguments, _, _ = entries(chip, file)[int(index)]
    if "q" in arguments:
        causal = "causal" if (arguments["mask"] or {}).get("causal_mask") else "full"
        return f"tokamax attention, {causal}, q {arguments['q'][4:]}, k {arguments['k'][4:]}"
    version = "v2" if "v2" in file else "v1"
    sizes = arguments["group_sizes"]
    skew = "" if isinstance(sizes, dict) else f", {sum(s > 0 for s in sizes)} groups with rows"
    return f"tokamax ragged_dot {version}, {arguments['lhs'][4:]} by {arguments['rhs'][4:]}{skew}"


def main() -> int:
    rows, failed = facts.load(RESULT).get("rows", []), []
    done = {row["entry"] for row in rows}
    chosen = [name for name in names() if name not in done]
    with tempfile.TemporaryDirectory() as folder:
        wanted = [(name.split(":")[1], name) for name in chosen]
        for chip, name, found in estimate_cases(wanted, Path(folder)):
            if "error" in found:
                failed.append(f"{name}: {found['error'][:200]}")
                print(failed[-1], flush=True)
                continue
            _, _, file, index = name.split(":")
            measured = 1e3 * entries(chip, file)[int(index)][2]
            row = {
                "what": describe(name),
                "chip": chip,
                "entry": name,
                "measured_us": round(measured, 1),
                "static_us": round(found["us"], 1),
                "num_unknown": len(found["unknown"]),  # branches and loops that no value decides
            }
            rows.append(row)
            print(f"{found['us'] / measured:.3f} {row}", flush=True)
    facts.save(
        RESULT,
        {
            "source": "tokamax 0.0.17, data/autotuning/, as shipped in its wheel on PyPI",
            "summary": summary(rows, len(failed)),
            "commit": facts.commit(),
            "versions": facts.versions(),
            "not_compiled": failed,
            "rows": rows,
        },
    )
    print(summary(rows, len(failed)))
    return 0


def summary(rows: list[dict[str, Any]], num_failed: int) -> str:
    ratios = [row["static_us"] / row["measured_us"] for row in rows]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    within = sum(error <= 0.10 for error in errors)
    return (
        f"Against {len(rows)} published measurements of tokamax kernels on v5e and v6e: static / "
        f"measured has a geometric mean of {mean:.3f}, a median error of "
        f"{statistics.median(errors):.1%} and a largest of {errors[-1]:.0%}; {within} are within "
        f"10 %. {num_failed} more did not compile with the versions used here."
    )


if __name__ == "__main__":
    sys.exit(main())
