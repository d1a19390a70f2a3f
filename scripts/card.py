"""Renders a CARD.md template into the README of a Hub repository.

A template is Markdown with `{{ key }}` where something is generated; KEYS lists what there is.
A build fills in everything but the names that only publishing knows (`{{ repo_id }}`, `{{ org }}`);
`name_repository` fills in those.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable

from manifest import BuildError, Checkout, Kernel
from public_api import Public, read_api

PLACEHOLDER = re.compile(r"\{\{ *(\w+)((?: +\w+)*) *\}\}")
TABLE_ROW = re.compile(r"\| *([A-Z]+)\d+(?:\.\d+)? *\|.*\d.*\| *\S.*\|")  # with a figure in it
TABLE_RULE = re.compile(r"\|( *:?-+:? *\|)+")
ON_PUBLISHING = ("repo_id", "org")
SIGNATURE_WIDTH = 90  # characters; a longer one is cut to the arguments without default

TRUST = """`kernels` runs code that it downloads, so it loads kernels of trusted publishers only.
`trust_remote_code=True` says that you trust `{{ org }}`; it is needed unless the Hub lists that
organisation as a trusted publisher, and a personal account never is one. `metadata.json` of every
variant names the commit it was built from and holds a digest of every file."""

ESTIMATES = """Static estimates of the compiled programs from the TPU compiler's own instruction
schedule; nothing here was measured on a TPU. Figures are multiples of the floor, the larger of
FLOPs / bfloat16 peak and bytes / achievable bandwidth; in brackets the best public TPU kernel or
XLA form by the same estimate."""

STAR = """

A star: more than 2 % of that program has no code to read, and counts as the memory traffic of its
results."""

MEASURE = """To measure on your machine: `pip install "kernels[benchmark]"`, then
`kernels benchmark DIR`, where DIR is the snapshot of `{{ repo_id }}` at revision `v%d`."""


class _Card:
    """What each key of a template stands for, for one kernel."""

    def __init__(self, kernel: Kernel, checkout: Checkout, variant: dict[str, bytes]):
        self.kernel, self.checkout = kernel, checkout
        self.api = read_api(variant.get)

    def functions(self) -> str:
        rows = [
            (f"`{name}`" if public.what == "value" else _call(name, public), public.summary)
            for name, public in self.api.items()
            if not name.startswith("layers.")
        ]
        return _table(("function", "what it computes"), rows)

    def layers(self) -> str:
        rows = [
            (
                f"`{name.removeprefix('layers.')}`",
                f"`forward({public.signature()})`",
                public.summary,
            )
            for name, public in self.api.items()
            if name.startswith("layers.")
        ]
        return _table(("layer", "called as", "what it computes"), rows) if rows else "No layers."

    def versions(self) -> str:
        kernel, pins = self.kernel, _pins(self.checkout)
        variants = ", ".join(f"`torch-{backend}`" for backend in kernel.backends)
        rows = [
            ("version of the kernel", f"{kernel.version}, on the branch `v{kernel.version}`; it "
             "changes only when a call that worked would fail or mean something else"),
            ("variants", f"{variants}: the same code, which follows the device of the tensors"),
            ("`kernels`", f"{kernel.kernels_minver} or newer"),
            ("torch", f"tested with {pins.get('torch', 'the current release')}"),
        ]  # fmt: skip
        names = ("torch-tpu", "jax", "libtpu")
        on_tpu = [f"`{name}=={pins[name]}`" for name in names if name in pins]
        if on_tpu:
            rows.append(("on a TPU also", ", ".join(on_tpu)))
        if kernel.source:
            rows.append(("source", kernel.source))
        return _table(("", ""), rows)

    def benchmarks(self, *letters: str) -> str:
        """Rows of README's tables whose case is one of these letters and a number."""
        header, rows = None, []
        lines = _text(self.checkout, "README.md").splitlines()
        for above, rule, row in zip(lines, lines[1:], lines[2:], strict=False):
            header = above if TABLE_ROW.fullmatch(row) and TABLE_RULE.fullmatch(rule) else header
        for line in lines:
            match = TABLE_ROW.fullmatch(line)
            rows += [line] if header and match and match[1] in letters else []
        measure = MEASURE % self.kernel.version
        if not rows:
            return f"No estimates are published with this version.\n\n{measure}"
        rule = "|---" * (header.count("|") - 1) + "|"
        star = STAR if any("*)" in row for row in rows) else ""
        return "\n".join([ESTIMATES + star, "", header, rule, *rows, "", measure])

    def trust(self) -> str:
        return TRUST

    def name(self) -> str:
        return self.kernel.name

    def version(self) -> str:
        return str(self.kernel.version)

    def license(self) -> str:
        return self.kernel.license.lower()


KEYS: dict[str, Callable[..., str]] = {
    key: getattr(_Card, key)
    for key in (
        "name", "version", "license", "functions", "layers", "versions", "benchmarks", "trust",
    )
}  # fmt: skip


def render_card(kernel: Kernel, checkout: Checkout, path: str, variant: dict[str, bytes]) -> bytes:
    """The template at `path` with everything filled in but ON_PUBLISHING.

    `variant`: the files of one variant, whose public names the card lists.
    """
    template = _text(checkout, path)
    card = _Card(kernel, checkout, variant)
    unknown = {m[1] for m in PLACEHOLDER.finditer(template)} - {*KEYS, *ON_PUBLISHING}
    if unknown:
        known = ", ".join([*KEYS, *ON_PUBLISHING])
        raise BuildError([f"{path}: unknown {{{{ {key} }}}}; there is {known}" for key in unknown])

    def fill(match: re.Match[str]) -> str:
        if match[1] in ON_PUBLISHING:
            return match[0]
        return KEYS[match[1]](card, *match[2].split())

    return PLACEHOLDER.sub(fill, template).encode()


def name_repository(card: str, repo_id: str) -> str:
    """A built card with the names of the Hub repository."""
    names = {"repo_id": repo_id, "org": repo_id.split("/")[0]}
    return PLACEHOLDER.sub(lambda match: names[match[1]], card)


def _call(name: str, public: Public) -> str:
    return f"`{name}({public.signature(SIGNATURE_WIDTH)})`"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    table = [f"| {' | '.join(line)} |" for line in escaped]
    table[1] = "|---" * len(header) + "|"
    return "\n".join(table)


def _text(checkout: Checkout, path: str) -> str:
    return checkout.read(path).decode() if path in checkout.files else ""


def _pins(checkout: Checkout) -> dict[str, str]:
    """Package -> version, of everything that pyproject.toml pins exactly."""
    try:
        project = tomllib.loads(_text(checkout, "pyproject.toml")).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise BuildError([f"pyproject.toml: {error}"]) from None
    extras = project.get("optional-dependencies", {}).values()
    requirements = [*project.get("dependencies", []), *(line for extra in extras for line in extra)]
    pins = (re.fullmatch(r"([\w-]+)==([\w.]+)", line) for line in requirements)
    return {pin[1]: pin[2] for pin in pins if pin}
