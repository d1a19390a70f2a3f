"""ragged_dot on the CPU: the reference against float64, the op's contract, the reported cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import RAGGED_DOT_EDGE, RaggedDotCase, group_ranges, ids, ragged_dot_inputs
from closeness import assert_rounded_once
from hypothesis import given, settings
from hypothesis import strategies as st
from interpret import run_kernel
from tpu_kernels.kernels.ragged_dot import ops
from tpu_kernels.kernels.ragged_dot.ops import ragged_dot

REFERENCE = "reference"
INTERPRET = "interpret"


def exact_forward(case: RaggedDotCase, inputs: dict, *, absolute: bool = False) -> torch.Tensor:
    """float64, one group at a time; with `absolute` the sums of magnitudes."""
    out = torch.zeros(case.m, case.n, dtype=torch.float64)
    value = (lambda x: x.double().abs()) if absolute else (lambda x: x.double())
    for g, start, stop in group_ranges(case):
        weight = value(inputs["rhs"][g])
        out[start:stop] = value(inputs["lhs"][start:stop]) @ (
            weight.T if case.transpose_rhs else weight
        )
        if case.bias:
            out[start:stop] += value(inputs["bias"][g])
    return out


def exact_gradients(case: RaggedDotCase, inputs: dict, *, absolute: bool = False) -> dict:
    value = (lambda x: x.double().abs()) if absolute else (lambda x: x.double())
    grads = {
        "lhs": torch.zeros(case.m, case.k, dtype=torch.float64),
        "rhs": torch.zeros(case.rhs_shape, dtype=torch.float64),
        "bias": torch.zeros(case.g, case.n, dtype=torch.float64),
    }
    for g, start, stop in group_ranges(case):
        grad, rows = value(inputs["grad"][start:stop]), value(inputs["lhs"][start:stop])
        weight = value(inputs["rhs"][g])
        grads["lhs"][start:stop] = grad @ (weight if case.transpose_rhs else weight.T)
        grads["rhs"][g] = grad.T @ rows if case.transpose_rhs else rows.T @ grad
        grads["bias"][g] = grad.sum(0)
    return grads


def offset_of(case: RaggedDotCase) -> torch.Tensor | None:
    return None if case.group_offset is None else torch.tensor(case.group_offset).int()


def forward(case: RaggedDotCase, inputs: dict, mode: str) -> torch.Tensor:
    if mode == REFERENCE:
        return ragged_dot(
            inputs["lhs"],
            inputs["rhs"],
            inputs["group_sizes"],
            transpose_rhs=case.transpose_rhs,
            group_offset=case.group_offset,
            bias=inputs["bias"],
            precision=case.precision,
        )
    from tpu_kernels.kernels.ragged_dot import lowering

    return run_kernel(
        lowering.ragged_dot,
        inputs["lhs"],
        inputs["rhs"],
        inputs["group_sizes"].int(),
        offset_of(case),
        inputs["bias"],
        case.transpose_rhs,
        case.precision,
        case.dtype,
    )


def gradients(case: RaggedDotCase, inputs: dict, mode: str) -> tuple[torch.Tensor, ...]:
    args = (
        inputs["grad"],
        inputs["lhs"],
        inputs["rhs"],
        inputs["group_sizes"].int(),
        offset_of(case),
        case.transpose_rhs,
        case.precision,
        True,
        True,
        True,
    )
    if mode == REFERENCE:
        return ops._ragged_dot_backward(*args)
    from tpu_kernels.kernels.ragged_dot import lowering

    return run_kernel(lowering.ragged_dot_backward, *args)


@pytest.mark.parametrize("mode", [REFERENCE, INTERPRET])
@pytest.mark.parametrize("case", RAGGED_DOT_EDGE, ids=ids(RAGGED_DOT_EDGE))
def test_forward_equals_float64(case: RaggedDotCase, mode: str) -> None:
    inputs = ragged_dot_inputs(case)
    out = forward(case, inputs, mode)
    assert out.dtype == getattr(torch, case.dtype)
    magnitude = exact_forward(case, inputs, absolute=True)
    assert_rounded_once(out, exact_forward(case, inputs), magnitude)


@pytest.mark.parametrize("mode", [REFERENCE, INTERPRET])
@pytest.mark.parametrize("case", RAGGED_DOT_EDGE, ids=ids(RAGGED_DOT_EDGE))
def test_gradients_equal_float64(case: RaggedDotCase, mode: str) -> None:
    inputs = ragged_dot_inputs(case)
    exact, magnitude = (exact_gradients(case, inputs, absolute=flag) for flag in (False, True))
    for name, grad in zip(("lhs", "rhs", "bias"), gradients(case, inputs, mode), strict=True):
        assert grad.dtype == getattr(torch, case.dtype)
        assert_rounded_once(grad, exact[name], magnitude[name], f"gradient of {name}")
        for g, start, stop in group_ranges(case):
            if start == stop and name != "lhs":
                assert (grad[g] == 0).all(), f"gradient of {name} of empty group {g} is not zero"


@st.composite
def problems(draw: st.DrawFn) -> dict:
    g = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(0, 9), min_size=g, max_size=g))
    return {
        "sizes": sizes,
        "m": sum(sizes) + draw(st.integers(0, 5)),
        "k": draw(st.integers(0, 9)),
        "n": draw(st.integers(0, 9)),
        "transpose_rhs": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "strided": draw(st.booleans()),
        "index_dtype": draw(st.sampled_from([torch.int32, torch.int64, torch.uint8])),
        "needs": draw(st.lists(st.booleans(), min_size=3, max_size=3)),
        "seed": draw(st.integers(0, 2**16)),
    }


@given(problems())
@settings(max_examples=150, deadline=None)
def test_any_shape_stride_and_requires_grad_subset(problem: dict) -> None:
    """Values and gradients equal autograd through torch's own matmuls, in float64."""
    m, k, n, g = problem["m"], problem["k"], problem["n"], len(problem["sizes"])
    generator = torch.Generator().manual_seed(problem["seed"])

    def leaf(*shape: int, needs: bool) -> torch.Tensor:
        if problem["strided"]:
            shape = (*shape[:-1], 2 * shape[-1])
        data = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (data[..., ::2] if problem["strided"] else data).requires_grad_(needs)

    needs_lhs, needs_rhs, needs_bias = problem["needs"]
    lhs = leaf(m, k, needs=needs_lhs)
    shape = (g, n, k) if problem["transpose_rhs"] else (g, k, n)
    rhs = leaf(*shape, needs=needs_rhs)
    bias = leaf(g, n, needs=needs_bias) if problem["bias"] else None
    sizes = torch.tensor(problem["sizes"], dtype=problem["index_dtype"])
    out = ragged_dot(lhs, rhs, sizes, transpose_rhs=problem["transpose_rhs"], bias=bias)

    pieces, start = [], 0
    for group, size in enumerate(problem["sizes"]):
        weight = rhs[group].T if problem["transpose_rhs"] else rhs[group]
        piece = lhs[start : start + size] @ weight
        pieces.append(piece if bias is None else piece + bias[group])
        start += size
    pieces.append(torch.zeros(m - start, n, dtype=torch.float64))
    expected = torch.cat(pieces)
    torch.testing.assert_close(out, expected)

    inputs = [x for x in (lhs, rhs, bias) if x is not None and x.requires_grad]
    assert out.requires_grad == bool(inputs)
    if inputs and expected.requires_grad:
        upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        ours = torch.autograd.grad(out, inputs, upstream)
        theirs = torch.autograd.grad(expected, inputs, upstream)
        for mine, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("n", [6, 4], ids=["n_is_k", "n_is_not_k"])
def test_gradcheck(n: int, transpose_rhs: bool) -> None:
    """Public peers return a transposed weight's gradient in the wrong layout."""
    sizes = torch.tensor([3, 0, 5])
    shape = (3, n, 6) if transpose_rhs else (3, 6, n)
    lhs = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    rhs = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, n, dtype=torch.float64, requires_grad=True)

    def call(lhs, rhs, bias):
        return ragged_dot(lhs, rhs, sizes, transpose_rhs=transpose_rhs, bias=bias)

    assert torch.autograd.gradcheck(call, (lhs, rhs, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck(dtype: torch.dtype) -> None:
    """DV07: schema, fake tensor, autograd registration and AOT dispatch of both ops."""
    lhs = torch.randn(9, 6).to(dtype).requires_grad_()
    rhs = torch.randn(3, 4, 6).to(dtype).requires_grad_()
    bias = torch.randn(3, 4).to(dtype).requires_grad_()
    sizes = torch.tensor([3, 0, 5], dtype=torch.int32)
    offset = torch.tensor(0, dtype=torch.int32)
    name = str(dtype).removeprefix("torch.")
    tolerance = {"rtol": 1e-2, "atol": 1e-2}
    torch.library.opcheck(
        ops._ragged_dot, (lhs, rhs, sizes, offset, bias, True, "default", name), **tolerance
    )
    grad = torch.randn(9, 4).to(dtype)
    torch.library.opcheck(
        ops._ragged_dot_backward,
        (grad, lhs.detach(), rhs.detach(), sizes, None, True, "default", True, False, True),
        **tolerance,
    )


def test_second_order_gradient_raises() -> None:
    lhs = torch.randn(4, 3, requires_grad=True)
    rhs = torch.randn(1, 3, 2, requires_grad=True)
    out = ragged_dot(lhs, rhs, torch.tensor([4])).square().sum()
    (grad,) = torch.autograd.grad(out, lhs, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order"):
        grad.sum().backward()


class Counter:
    """A torch.compile backend that counts compilations."""

    def __init__(self) -> None:
        self.compilations = 0

    def __call__(self, graph, inputs):
        self.compilations += 1
        return graph.forward


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_new_routing_does_not_recompile(dynamic: bool | None) -> None:
    """RD12, DV05: one graph, no break, whatever the group sizes are; one more for a new m."""
    torch._dynamo.reset()
    counter = Counter()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend=counter)
    def call(lhs, rhs, sizes):
        return ragged_dot(lhs, rhs, sizes, transpose_rhs=True)

    rhs = torch.randn(2, 5, 3)
    for sizes in ([8, 8], [16, 0], [1, 15]):
        lhs = torch.randn(16, 3)
        sizes = torch.tensor(sizes)
        torch.testing.assert_close(
            call(lhs, rhs, sizes), ragged_dot(lhs, rhs, sizes, transpose_rhs=True)
        )
    assert counter.compilations == 1
    for m in (24, 32):
        lhs = torch.randn(m, 3)
        sizes = torch.tensor([7, 11])
        torch.testing.assert_close(
            call(lhs, rhs, sizes), ragged_dot(lhs, rhs, sizes, transpose_rhs=True)
        )
    assert counter.compilations <= (3 if dynamic is False else 2)


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("eager", True),
        ("eager", False),
        ("aot_eager", True),
        ("aot_eager", False),
        ("inductor", True),
    ],
)
def test_compiled_training_step(backend: str, dynamic: bool) -> None:
    """DV04: fullgraph, forward and backward, equal to eager."""
    torch._dynamo.reset()

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 5, 4))
            self.bias = torch.nn.Parameter(torch.randn(3, 5))

        def forward(self, x, sizes):
            return ragged_dot(x, self.weight, sizes, transpose_rhs=True, bias=self.bias).relu()

    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    x = torch.randn(12, 4, requires_grad=True)
    sizes = torch.tensor([5, 0, 4])
    inputs = (x, layer.weight, layer.bias)
    ours = torch.autograd.grad(compiled(x, sizes).square().sum(), inputs)
    eager = torch.autograd.grad(layer(x, sizes).square().sum(), inputs)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)


def test_no_tokens() -> None:
    """RD10: m = 0 works forward, backward and compiled."""
    torch._dynamo.reset()
    lhs = torch.randn(0, 64, requires_grad=True)
    rhs = torch.randn(4, 64, 32, requires_grad=True)
    sizes = torch.zeros(4, dtype=torch.int64)
    for call in (ragged_dot, torch.compile(ragged_dot, fullgraph=True, backend="aot_eager")):
        out = call(lhs, rhs, sizes)
        assert out.shape == (0, 32)
        grad_lhs, grad_rhs = torch.autograd.grad(out.sum(), (lhs, rhs))
        assert grad_lhs.shape == (0, 64)
        assert (grad_rhs == 0).all() and grad_rhs.shape == rhs.shape


@pytest.mark.parametrize(
    "shape", [(0, 4, 3), (4, 0, 3), (4, 3, 0)], ids=["no_rows", "no_k", "no_columns"]
)
@pytest.mark.parametrize("bias", [False, True])
def test_zero_sizes_on_the_kernel_path(shape: tuple[int, int, int], bias: bool) -> None:
    m, k, n = shape
    case = RaggedDotCase("zero", "limits", m, k, n, (m // 2, m // 4), bias=bias, dtype="float32")
    inputs = ragged_dot_inputs(case)
    torch.testing.assert_close(forward(case, inputs, INTERPRET), forward(case, inputs, REFERENCE))
    for a, b in zip(
        gradients(case, inputs, INTERPRET), gradients(case, inputs, REFERENCE), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8])
def test_integer_sizes_of_any_width(dtype: torch.dtype) -> None:
    """RD09, DV02: bitwise the same result as with int32."""
    lhs, rhs = torch.randn(16, 64), torch.randn(2, 64, 32)
    expected = ragged_dot(lhs, rhs, torch.tensor([8, 8], dtype=torch.int32))
    assert torch.equal(ragged_dot(lhs, rhs, torch.tensor([8, 8], dtype=dtype)), expected)


def test_offsets_convert_in_one_line_and_are_not_taken_for_sizes() -> None:
    """RD13: the docstring's conversion from cumulative end offsets."""
    lhs, rhs = torch.randn(16, 4), torch.randn(4, 4, 3)
    offsets = torch.tensor([8, 8, 16, 16], dtype=torch.int32)
    sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
    assert sizes.tolist() == [8, 0, 8, 0]
    expected = ragged_dot(lhs, rhs, torch.tensor([8, 0, 8, 0]))
    assert torch.equal(ragged_dot(lhs, rhs, sizes), expected)
    with pytest.raises(ValueError, match="cumulative offsets"):
        ragged_dot(lhs, rhs, offsets)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_group_offset(as_tensor: bool) -> None:
    """RD15: rhs holds groups 1 and 2 of 4."""
    lhs, rhs, sizes = torch.randn(16, 8), torch.randn(2, 8, 5), torch.tensor([4, 4, 4, 4])
    out = ragged_dot(lhs, rhs, sizes, group_offset=torch.tensor(1) if as_tensor else 1)
    torch.testing.assert_close(out[4:8], lhs[4:8] @ rhs[0])
    torch.testing.assert_close(out[8:12], lhs[8:12] @ rhs[1])
    assert (out[:4] == 0).all() and (out[12:] == 0).all()


def test_highest_precision_keeps_float32() -> None:
    """RD17: 128 x (1 + 2^-10) is 128.125, and 128.0 after rounding to bfloat16."""
    lhs = torch.full((8, 128), 1 + 2.0**-10)
    out = ragged_dot(lhs, torch.ones(1, 128, 128), torch.tensor([8]), precision="highest")
    assert (out - 128.125).abs().max() < 1e-3


def test_out_dtype() -> None:
    lhs, rhs = torch.randn(8, 64).bfloat16(), torch.randn(2, 64, 8).bfloat16()
    out = ragged_dot(lhs, rhs, torch.tensor([3, 5]), out_dtype=torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out[:3], lhs[:3].float() @ rhs[0].float())


def test_nothing_is_changed_or_aliased() -> None:
    """DV14: functional, and no output shares storage with an input."""
    lhs, rhs = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, 3, requires_grad=True)
    sizes = torch.tensor([2, 4])
    before = [x.detach().clone() for x in (lhs, rhs, sizes)]
    out = ragged_dot(lhs, rhs, sizes)
    grads = torch.autograd.grad(out.sum(), (lhs, rhs))
    for x, copy in zip((lhs, rhs, sizes), before, strict=True):
        assert torch.equal(x, copy)
    storages = {x.untyped_storage().data_ptr() for x in (lhs, rhs, sizes)}
    assert all(x.untyped_storage().data_ptr() not in storages for x in (out, *grads))


def test_autocast_promotes_mixed_floats() -> None:
    """DV12, RD22: a TypeError outside autocast, torch's promotion inside."""
    lhs, rhs = torch.randn(4, 3).bfloat16(), torch.randn(1, 3, 2)
    with pytest.raises(TypeError, match=r"lhs torch.bfloat16, rhs torch.float32"):
        ragged_dot(lhs, rhs, torch.tensor([4]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ragged_dot(lhs, rhs, torch.tensor([4])).dtype == torch.float32
        assert ragged_dot(lhs.float(), rhs, torch.tensor([4])).dtype == torch.float32


def test_autocast_does_not_round_float32_inputs() -> None:
    """DV12: float32 stays float32 inside autocast, products and gradients too."""
    lhs, rhs = torch.randn(64, 96, requires_grad=True), torch.randn(2, 96, 32, requires_grad=True)
    sizes = torch.tensor([30, 34])

    def step() -> tuple[torch.Tensor, ...]:
        out = ragged_dot(lhs, rhs, sizes)
        return out, *torch.autograd.grad(out.square().sum(), (lhs, rhs))

    expected = step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for value, right in zip(step(), expected, strict=True):
            torch.testing.assert_close(value, right)


def arguments(**changes: object) -> dict:
    return {
        "lhs": torch.randn(8, 4),
        "rhs": torch.randn(3, 4, 5),
        "group_sizes": torch.tensor([2, 2, 2]),
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lhs": torch.randn(8)}, ValueError, "lhs: expected 2 dimensions, got shape"),
        ({"lhs": [1]}, TypeError, "lhs: expected a tensor, got list"),
        ({"lhs": torch.ones(8, 4, dtype=torch.int32)}, TypeError, "lhs: expected dtype"),
        ({"rhs": torch.randn(4, 5)}, ValueError, "rhs: expected 3 dimensions"),
        ({"rhs": torch.randn(3, 6, 5)}, ValueError, r"rhs: expected \[g, k, n\] with k = 4"),
        ({"transpose_rhs": True}, ValueError, r"rhs: expected \[g, n, k\] with k = 4"),
        ({"transpose_rhs": 1}, TypeError, "transpose_rhs: expected True or False"),
        ({"group_sizes": torch.tensor([2, 2])}, ValueError, r"group_sizes: expected shape \[g\]"),
        (
            {"group_sizes": torch.tensor([2.0, 2, 2])},
            TypeError,
            "group_sizes: expected dtype int32",
        ),
        ({"group_sizes": torch.ones(3, 1).int()}, ValueError, "group_sizes: expected 1 dimensions"),
        ({"group_sizes": torch.tensor([5, 5, 0])}, ValueError, "at most m = 8 rows of lhs, got 10"),
        ({"group_sizes": torch.tensor([-1, 9, 0])}, ValueError, "no negative size, got -1"),
        ({"group_sizes": torch.tensor([2**31, 0, 0])}, ValueError, "at most m = 8"),
        ({"group_offset": 1}, ValueError, r"at least group_offset \+ g = 1 \+ 3 sizes"),
        ({"group_offset": -1}, ValueError, "group_offset >= 0"),
        ({"group_offset": 1.0}, TypeError, "group_offset: expected a Python int, got 1.0"),
        ({"group_offset": torch.tensor([0])}, ValueError, "group_offset: expected 0 dimensions"),
        ({"bias": torch.randn(3, 4)}, ValueError, r"bias: expected shape \[g, n\] = \(3, 5\)"),
        ({"bias": torch.randn(3, 5).half()}, TypeError, "bias torch.float16"),
        ({"precision": "high"}, ValueError, "precision: expected one of 'default', 'highest'"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype: expected a float torch.dtype"),
        ({"rhs": torch.ones(3, 4, 5, dtype=torch.int8)}, ValueError, "rhs_scale: expected"),
        ({"rhs_scale": torch.ones(3, 5)}, ValueError, "rhs_scale: expected None for rhs"),
        ({"group_sizes": torch.empty(3, device="meta").int()}, ValueError, "group_sizes on meta"),
        ({"scale": 2}, TypeError, "scale"),
    ],
)
def test_bad_input_is_named(changes: dict, error: type[Exception], message: str) -> None:
    """RD20, DV17 and all the rest: before anything runs, with argument, expected and got."""
    with pytest.raises(error, match=message):
        ragged_dot(**arguments(**changes))


def test_sizes_out_of_contract_write_nothing_outside() -> None:
    """RD20 where sizes are never read back: they are clipped to the rows there are."""
    case = RaggedDotCase("overflow", "RD20", 8, 4, 5, (5, 5, 2**31 - 1, -7), dtype="float32")
    inputs = {
        "lhs": torch.randn(8, 4),
        "rhs": torch.randn(4, 4, 5),
        "group_sizes": torch.tensor(case.sizes),
        "bias": None,
    }
    out = forward(case, inputs, INTERPRET)
    torch.testing.assert_close(out[:5], inputs["lhs"][:5] @ inputs["rhs"][0])
    torch.testing.assert_close(out[5:], inputs["lhs"][5:] @ inputs["rhs"][1])


@pytest.mark.parametrize("offset", [-3, 2, 2**31 - 1])
def test_offset_out_of_contract_stays_inside(offset: int) -> None:
    """group_offset + g past the sizes, where it is never read back: nothing outside is touched."""
    case = RaggedDotCase(
        "offset", "RD20", 8, 4, 5, (2, 3, 2), True, "float32", group_offset=offset, num_groups=2
    )
    inputs = ragged_dot_inputs(replace(case, group_offset=1))
    for result in (forward(case, inputs, INTERPRET), gradients(case, inputs, INTERPRET)[1]):
        assert result.shape[0] in (8, 2)
