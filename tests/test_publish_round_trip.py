"""Published, then used as users do: get_kernel and the `kernels` commands in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_hub import LocalHub
from publish_world import REPO, World, code_of, git, run
from tiny_kernel import ROOT, build, read_files


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("releases"))


@pytest.fixture(scope="module")
def hub(world) -> LocalHub:
    """Versions 2 and 3 published, version 3 updated."""
    with world.hub(trusted=("org",)) as hub:
        assert run(world.roots["again"], hub, "--execute").code == 0
        yield hub


def user_process(hub: LocalHub, cache: Path, *command: str) -> subprocess.Popen:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TPU_"))}
    env |= {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(cache),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", *command], env=env, cwd="/", stdout=pipe, stderr=pipe, text=True
    )


def output(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-3000:]
    return out


LOAD = """
import json
from pathlib import Path
import torch
from kernels import get_kernel

REPO, OLD = {values!r}
report = {{}}
for name, options in (("v3", {{"version": 3}}), ("old", {{"revision": OLD}})):
    kernel = get_kernel(REPO, trust_remote_code=True, **options)
    double = kernel.layers.Double()(torch.ones(1)).item()
    report[name] = [kernel.__name__, kernel.double(torch.ones(1)).item(), double, kernel.__file__]
print(json.dumps(report))
"""


def test_get_kernel_from_the_hub(hub, world, tmp_path):
    """The new version 3 and, as a user who pinned it, the one before, in one fresh process."""
    old = world.repos[REPO].branches["v3"]
    report = json.loads(output(user_process(hub, tmp_path, LOAD.format(values=(REPO, old)))))
    for name, release in (("v3", "again"), ("old", "three")):
        identity, function, layer, file = report[name]
        variant = Path(file).parent
        files = world.files(release)
        metadata = json.loads(files[f"build/{variant.name}/metadata.json"])
        assert (identity, function, layer) == (metadata["id"], 2.0, 2.0)
        expected = {p: d for p, d in files.items() if p.startswith(f"build/{variant.name}/")}
        assert read_files(variant) == {p.split("/", 2)[2]: d for p, d in expected.items()}


SHIPPED = """
import json, torch
from kernels import get_kernel

x, sizes = torch.randn(4, 8), torch.tensor([1, 3])
kernel = {name: get_kernel(f"org/{name}-tpu", version=1, trust_remote_code=True)
          for name in ("ragged-dot", "attention", "rmsnorm", "rotary")}
q = torch.randn(1, 4, 2, 16)
torch.testing.assert_close(kernel["ragged-dot"].ragged_dot(x, torch.ones(2, 8, 3), sizes),
                           x.sum(1, keepdim=True).expand(4, 3))
torch.testing.assert_close(kernel["attention"].flash_attention(q, q, torch.ones_like(q)),
                           torch.ones_like(q))
torch.testing.assert_close(kernel["rmsnorm"].rms_norm(x, None, 0.0).square().mean(1), torch.ones(4))
heads, table = q.transpose(1, 2), torch.ones(1, 4, 16)
turned, _ = kernel["rotary"].apply_rotary(heads, None, table, 0 * table)
torch.testing.assert_close(turned, heads)
print(json.dumps({name: module.__name__ for name, module in kernel.items()}))
"""


def test_every_shipped_kernel_from_the_hub(tmp_path):
    """The last commit of this repository: published at once, then each kernel does its work."""
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked tarball cannot be published")
    git(tmp_path, "clone", "--quiet", str(ROOT), "clone")
    root = tmp_path / "clone"
    build.build(root, root / "build")
    with LocalHub() as hub:
        result = run(root, hub, "--execute")
        assert result.code == 0, result
        assert "up to date" in run(root, hub, "--execute").out
        names = json.loads(output(user_process(hub, tmp_path / "cache", SHIPPED)))
        assert set(hub.repos) == {f"org/{name}-tpu" for name in names}
        for name, identity in names.items():
            files = code_of(hub.repos[f"org/{name}-tpu"], "v1")
            assert any(identity.encode() in data for data in files.values())
            card = hub.repos[f"org/{name}-tpu"].files("main")["README.md"].decode()
            assert "{{" not in card and f"org/{name}-tpu" in card


COMMAND = "import sys; sys.argv[0] = 'kernels'; from kernels.cli import main; main()"


def test_the_commands_of_the_hub_library(hub, world, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    dependencies = f'[tool.kernels.dependencies]\n"{REPO}" = 3\n'
    (project / "pyproject.toml").write_text(dependencies)
    cache = tmp_path / "cache"
    info = user_process(hub, cache, COMMAND, "info", REPO, "--version", "2", "--json")
    versions = user_process(hub, cache, COMMAND, "versions", REPO)
    lock = user_process(hub, cache, COMMAND, "lock", str(project))

    described = json.loads(output(info))
    assert described["revision"] == "v2" and described["name"] == "tiny-op"
    assert described["version"] == 2 and described["license"] == "Apache-2.0"
    assert described["backends"] == ["cpu", "tpu", "universal"]

    listed = output(versions)
    assert "Version 2:" in listed and "Version 3:" in listed and listed.count("preferred") == 2

    output(lock)
    assert hub.repos[REPO].branches["v3"] in (project / "kernels.lock").read_text()
    output(user_process(hub, cache, COMMAND, "download", str(project), "--all-variants"))
    (snapshot,) = cache.glob(f"hub/kernels--*/snapshots/{hub.repos[REPO].branches['v3']}")
    files = code_of(hub.repos[REPO], "v3")
    assert {p: d for p, d in read_files(snapshot).items() if p.startswith("build/")} == {
        p: d for p, d in files.items() if p.startswith("build/")
    }
