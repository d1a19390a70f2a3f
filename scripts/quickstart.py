"""The main job from nothing: build the Hub kernels, load them as users do, run a real MoE model.

    make quickstart        (or: python scripts/quickstart.py, in an environment with the extras)

1. builds the Hub variants into build/;  2. loads them through `kernels.get_kernel`;
3. runs Qwen3-MoE from transformers, forward and backward, with the experts from the kernel against
   transformers' own: a small random model, then one layer at the sizes of Qwen3-30B-A3B;
4. compiles the same ops with the real TPU compiler for v5e and v6e, TPU or not.
"""

from __future__ import annotations

import glob
import importlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
HUB_NAMES = ("ragged-dot-tpu", "attention-tpu", "rmsnorm-tpu", "rotary-tpu")
HAS_TPU = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))

os.environ.update(
    LOCAL_KERNELS=":".join(f"org/{name}={ROOT / 'build' / name}" for name in HUB_NAMES),
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TF_CPP_MIN_LOG_LEVEL="3",
    TORCH_CPP_LOG_LEVEL="ERROR",
    PYTHONWARNINGS="ignore",
)
# For a process that only compiles: libtpu then asks nobody where it is, and no chip is opened.
COMPILE_ONLY = {
    # Where there is no TPU, torch_tpu would look for one at `import torch`, and can hang.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
if not HAS_TPU:
    os.environ.update(COMPILE_ONLY)

IS_COMPILING = len(sys.argv) > 1  # started by `main` with its own start time
START = float(sys.argv[1]) if IS_COMPILING else time.time()


def say(text: str = "") -> None:
    print(f"[{time.time() - START:5.1f} s] {text}" if text else "", flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    say(title)
    yield
    say()


def build() -> None:
    import build as builder

    if builder.main([]) != 0:
        raise SystemExit(1)


def load() -> dict[str, ModuleType]:
    import torch

    import kernels

    # A CUDA wheel of torch without a GPU, as pip installs by default, takes torch-universal.
    loaded = {name: kernels.get_kernel(f"org/{name}", version=1) for name in HUB_NAMES}
    for kernel in loaded.values():
        say(f"  {kernel.__name__} with {', '.join(kernel.__all__)}")
    say(f"  torch {torch.__version__}, tensors on {'tpu' if HAS_TPU else 'cpu'}")
    return loaded


def relative_difference(a, b) -> float:
    scale = b.float().abs().max().clamp(min=1e-30)
    return ((a.float() - b.float()).abs().max() / scale).item()


def run_model(loaded: dict[str, ModuleType]) -> None:
    import torch
    from kernels.layer import Mode
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    import kernels

    experts_forward = loaded["ragged-dot-tpu"].experts_forward
    ALL_EXPERTS_FUNCTIONS.register("ragged_dot_tpu", experts_forward)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
    )
    device = "tpu" if HAS_TPU else "cpu"
    model = Qwen3MoeForCausalLM(config).to(device)
    tokens = torch.randint(0, 512, (2, 64), device=device)

    def step() -> tuple:
        model.zero_grad()
        output = model(tokens, labels=tokens)
        output.loss.backward()
        grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        return output.logits.detach().cpu(), grads

    model.set_experts_implementation("grouped_mm")
    expected, expected_grads = step()
    model.set_experts_implementation("ragged_dot_tpu")
    compare_steps("experts", step(), expected, expected_grads)
    model.set_attn_implementation("org/attention-tpu", allow_all_kernels=True)
    compare_steps("experts and attention", step(), expected, expected_grads)
    layers = {"RMSNorm": ("rmsnorm-tpu", "RMSNorm")}
    layers["rotary_pos_emb"] = ("rotary-tpu", "apply_rotary_transformers")
    kernels.register_kernel_mapping(
        {
            hook: {device: kernels.LocalLayerRepository(ROOT / "build" / name, layer_name=layer)}
            for hook, (name, layer) in layers.items()
        },
        inherit_mapping=False,
    )
    logging.getLogger("kernels").setLevel(logging.ERROR)  # it lists the hooks left alone
    kernels.kernelize(model, mode=Mode.TRAINING, device=device)
    compare_steps("experts, attention, norms and rotary", step(), expected, expected_grads)


def compare_steps(what: str, step: tuple, expected, expected_grads: dict) -> None:
    logits, grads = step
    difference = relative_difference(logits, expected)
    worst = max(relative_difference(grads[name], expected_grads[name]) for name in grads)
    say(f"  {what} from the kernels; largest relative difference to transformers' own:")
    say(f"    logits {difference:.1e}, gradients of {len(grads)} parameters {worst:.1e}")
    if difference > 1e-3 or worst > 1e-2:
        raise SystemExit("the kernel and transformers disagree")


def run_real_layer() -> None:
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(0)
    config = Qwen3MoeConfig(  # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    )
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    block = block.to(torch.bfloat16).to_empty(device="tpu" if HAS_TPU else "cpu")
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    say(f"  {sum(p.numel() for p in block.parameters()) / 1e6:.0f} M parameters in bfloat16")
    x = torch.randn(1, 16, 2048, dtype=torch.bfloat16, device=block.gate.weight.device)
    results = []
    for implementation in ("grouped_mm", "ragged_dot_tpu"):
        config._experts_implementation = implementation
        leaf = x.clone().requires_grad_()
        start = time.time()
        out = block(leaf)
        out = out[0] if isinstance(out, tuple) else out
        # Gradients of the input and, of the experts, one: they are 1.2 GB.
        grads = torch.autograd.grad(out.float().square().sum(), (leaf, block.experts.down_proj))
        results.append((out.detach().cpu(), grads[0].cpu(), grads[1][:4].cpu()))
        say(f"  {implementation}: 16 tokens forward and backward, {time.time() - start:.1f} s")
    names = ("output", "gradient of x", "gradient of W2")
    for name, theirs, ours in zip(names, *results, strict=True):
        difference = relative_difference(ours, theirs)
        say(f"  {name}: largest relative difference {difference:.1e} (bfloat16: 3.9e-03)")
        if difference > 5e-2:
            raise SystemExit("the kernel and transformers disagree")


def compile_for_chips(kernel: ModuleType) -> None:
    """The JAX functions behind the loaded variant's ops, through libtpu."""
    import aot
    import jax
    import jax.numpy as jnp

    def module(name: str) -> ModuleType:
        return importlib.import_module(f"{kernel.__name__}.{name}")

    grouped = module("kernels.ragged_dot.lowering")
    experts = module("kernels.moe_experts.lowering")

    grouped_tiling = module("kernels.ragged_dot.tiling")
    grad_tiling = module("kernels.ragged_dot.tiling_bwd")
    experts_tiling = module("kernels.moe_experts.tiling")
    g, m, k, n, t, topk = 128, 4096, 2048, 1536, 512, 8

    def spec(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def forward(lhs, rhs, sizes, chip):
        return grouped.ragged_dot(
            lhs, rhs, sizes, None, None, True, "default", "bfloat16", chip=chip
        )

    def weight_grad(grad, lhs, sizes, chip):
        return grouped.weight_grad(grad, lhs, sizes, None, g, "default", chip=chip)

    def layer(x, index, weights, gate_up, down, chip):
        return experts.moe_experts(
            x, index, weights, gate_up, down, None, None, "silu", False, True, g, chip=chip
        )

    def vmem_bytes(chip) -> tuple[int, int, int]:
        bf16, itemsize = "bfloat16", 2
        return (
            grouped_tiling.choose(m, k, n, g, bf16, bf16, True, chip).vmem_bytes,
            grad_tiling.choose(m, n, k, g, bf16, bf16, chip).vmem_bytes(itemsize, itemsize),
            experts_tiling.choose(t, topk, g, k, n // 2, bf16, True, chip).vmem_bytes,
        )

    lhs, rhs, sizes = spec(m, k), spec(g, n, k), spec(g, dtype=jnp.int32)
    routing = spec(t, topk, dtype=jnp.int32), spec(t, topk, dtype=jnp.float32)
    programs = [
        (f"ragged_dot {m}x{k} . {g}x{n}x{k}", forward, (lhs, rhs, sizes), 2 * m * k * n),
        ("  its weight gradient", weight_grad, (spec(m, n), lhs, sizes), 2 * m * k * n),
        (
            f"moe_experts of {t} tokens",
            layer,
            (spec(t, k), *routing, rhs, spec(g, k, n // 2)),
            3 * t * topk * k * n,
        ),
    ]
    say("  Static facts of compiled programs, not times measured on a TPU. Roofline: the larger of")
    say("  FLOPs / bfloat16 peak and bytes (inputs and outputs once) / HBM bandwidth.")
    for chip in (module("tpu_runtime").CHIPS[name] for name in ("v5e", "v6e")):
        for (name, fn, args, flops), vmem in zip(programs, vmem_bytes(chip), strict=True):
            say(f"  {chip.name}: compiling {name} ...")

            def run(*arrays, fn=fn, chip=chip):
                return fn(*arrays, chip=chip)

            memory = aot.compile_for(run, args, chip.name).memory_analysis()
            moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
            times = {
                "MXU": flops / chip.bf16_flops * 1e6,
                "HBM": moved / chip.hbm_bytes_per_s * 1e6,
            }
            bound = max(times, key=times.get)
            say(
                f"       VMEM {vmem / 2**20:.0f} of {chip.vmem_bytes / 2**20:.0f} MiB, "
                f"HBM {moved / 1e9:.2f} GB and {memory.temp_size_in_bytes / 1e9:.2f} GB temporary, "
                f"roofline {times[bound]:.0f} us ({bound})"
            )


def main() -> None:
    sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "bench")]
    if IS_COMPILING:
        import kernels

        compile_for_chips(kernels.get_kernel("org/ragged-dot-tpu", version=1))
        return
    with step("Building the Hub kernels"):
        build()
    with step('Loading them: kernels.get_kernel("org/ragged-dot-tpu", version=1) and so on'):
        loaded = load()
    with step("Qwen3-MoE, small random model, forward and backward"):
        run_model(loaded)
    with step("One Qwen3-30B-A3B experts layer at its real sizes"):
        run_real_layer()
    with step("Compiling the ops of ragged-dot-tpu with the TPU compiler"):
        command = [sys.executable, __file__, str(START)]
        subprocess.run(command, env={**os.environ, **COMPILE_ONLY}, check=True)
    say("Done. Next: README.md, and `make test`.")


if __name__ == "__main__":
    main()
