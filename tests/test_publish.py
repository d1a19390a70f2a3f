"""scripts/publish.py: the plan, what it uploads and in which order, and everything it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import public_api
import pytest
from local_hub import LocalHub, Repo
from publish_world import CHANGES, COMMON, NAME, REPO, World, code_of, git, make_release, run
from tiny_kernel import FILES, build, make_repository

METADATA = f"build/{NAME}/build/torch-cpu/metadata.json"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("releases"))


@pytest.fixture
def copy(world, tmp_path) -> Path:
    """The repository of the release "again", to be spoiled."""
    return Path(shutil.copytree(world.roots["again"], tmp_path / "copy"))


def test_a_plan_changes_nothing(world):  # HB01, HB02
    with world.hub() as hub:
        result = run(world.roots["again"], hub, token=None)
        assert hub.writes() == [] and result.code == 0
    lines = [line.strip() for line in result.out.splitlines()]
    assert lines[0] == "tiny-op: kernel repository org/tiny-op (exists)"
    assert lines[1] == "branch v3: 3 added, 12 changed, 3 deleted"
    assert "+ build/torch-tpu/kernels/tiny/other.py" in lines
    assert "~ build/torch-universal/kernels/tiny/ops.py" in lines
    assert "- build/torch-cpu/kernels/tiny/extra.py" in lines
    assert lines[-3:-1] == ["branch main: 0 added, 1 changed, 0 deleted", "~ README.md"]
    assert "--execute" in lines[-1]


def test_order_of_a_first_publication(world):
    with LocalHub() as hub:
        result = run(world.roots["three"], hub, "--execute")
        assert result.code == 0, result
        assert hub.requests[0] == "GET /api/whoami-v2"
        assert hub.writes() == [
            "POST /api/repos/create",
            f"POST /api/kernels/{REPO}/branch/v3",
            f"POST /api/kernels/{REPO}/commit/v3",
            f"POST /api/kernels/{REPO}/commit/main",
        ]
        repo = hub.repos[REPO]
    assert code_of(repo, "v3") == world.files("three")
    assert set(repo.files("main")) == {".gitattributes", "README.md"}  # made by the Hub, and ours
    assert repo.files("main")["README.md"] == world.readme("three")


def test_an_update_is_one_commit_on_its_parent(world):
    with world.hub() as hub:
        head, old = hub.repos[REPO].branches["v3"], hub.repos[REPO].branches["v2"]
        hub.repos[REPO].commit("v3", hub.repos[REPO].files("v3") | {"notes.md": b"theirs"})
        head = hub.repos[REPO].branches["v3"]
        assert run(world.roots["again"], hub, "--execute").code == 0
        repo = hub.repos[REPO]
        assert repo.history("v3")[1] == head and repo.branches["v2"] == old
        assert code_of(repo, "v3") == world.files("again")
        assert repo.files("v3")["notes.md"] == b"theirs"  # not ours to delete


def test_the_card_says_what_users_need(world):  # HB04, HB12
    readme = world.repos[REPO].files("main")["README.md"].decode()
    assert "# tiny-op, version 3, of org/tiny-op" in readme and "{{" not in readme
    for text in (
        "`trust_remote_code=True` says that you trust `org`",
        "a personal account never is one",
        "| `double(x)` |",
        "| `Double` | `forward(x)` |",
        "on the branch `v3`",
        "No estimates are published with this version.",
    ):
        assert text in readme


def test_without_benchmarks(tmp_path):  # HB18
    root = make_release(tmp_path / "repo", {"benchmarks/tiny-op/benchmark.py": None})
    with LocalHub() as hub:
        assert run(root, hub, "--execute").code == 0
        assert not any(path.startswith("benchmarks") for path in hub.repos[REPO].files("v3"))


def test_an_old_version_leaves_the_readme_of_the_newer(world, tmp_path):
    changes = CHANGES["two"] | {"kernels/tiny/fix.py": "FIXED = True\n"}
    root = make_release(tmp_path / "repo", changes)
    with world.hub() as hub:
        result = run(root, hub, "--execute")
        assert result.code == 0 and "README.md stays that of a newer version" in result.out
        assert hub.repos[REPO].files("main") == world.repos[REPO].files("main")
        assert "build/torch-cpu/kernels/tiny/fix.py" in hub.repos[REPO].files("v2")
        assert hub.repos[REPO].branches["v3"] == world.repos[REPO].branches["v3"]


def test_signatures_are_kept(copy):
    """A signature comes out new every time; only that of changed metadata is replaced."""
    signature = f"{METADATA.removeprefix(f'build/{NAME}/')}.sigstore"
    file = copy / "build" / NAME / signature
    with LocalHub() as hub:
        file.write_text("first")
        assert run(copy, hub, "--execute").code == 0
        repo = hub.repos[REPO]
        file.write_text("second")
        assert "up to date" in run(copy, hub, "--execute").out
        file.unlink()
        assert "up to date" in run(copy, hub, "--execute").out
        assert repo.files("v3")[signature] == b"first"
        make_repository(copy, COMMON | CHANGES["again"] | {"tpu_runtime/more.py": ""})
        git(copy, "add", "--all")
        git(copy, "commit", "--quiet", "--message", "x")
        build.build(copy, copy / "build")
        assert run(copy, hub, "--execute").code == 0
        assert signature not in repo.files("v3")  # it signed other metadata


def test_without_a_token(world):
    with world.hub() as hub:
        result = run(world.roots["again"], hub, "--execute", token=None)
        assert result.code == 3 and "hf auth login" in result.err and hub.requests == []


def test_without_a_network(world):
    plan = run(world.roots["again"], None, "--tries", "1")
    assert plan.code == 0 and "warning: " in plan.err and "branch v3" in plan.out
    result = run(world.roots["again"], None, "--tries", "1", "--execute")
    assert result.code == 6 and "run again" in result.err


def test_all_kernels_are_checked_before_the_first_upload(world, tmp_path):
    second = {
        "build.toml": FILES["build.toml"].replace("[tiny-op]", TABLE + "[tiny-op]"),
        "torch-ext/tiny_two/__init__.py": "one = 1\n__all__ = ['one']\n",
    }
    root = make_release(tmp_path / "repo", second)
    with LocalHub() as hub:
        assert run(root, hub, "--execute").code == 0
        assert set(hub.repos) == {"org/tiny-op", "org/tiny-two"}
        hub.requests.clear()
        changes = second | CHANGES["again"] | {"build.toml": second["build.toml"]}
        changes["torch-ext/tiny_two/__init__.py"] = "two = 2\n__all__ = ['two']\n"
        root = make_release(tmp_path / "next", changes)
        result = run(root, hub, "--execute")
        assert result.code == 1 and "tiny-two: one is gone" in result.err
        assert hub.writes() == []
        assert run(root, hub, "--execute", "--kernel", "tiny-op").code == 0
        assert len(hub.repos["org/tiny-two"].history("v1")) == 2


TABLE = '[tiny-two]\nversion = 1\npackages = ["tiny"]\nbackends = ["tpu"]\n'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "one of the arguments --repo-id --org is required"),  # HB16
        (["--repo-id", "tiny-op"], "--repo-id must look like ORG/NAME"),
        (["--org", "a/b"], "--org must look like ORG"),
        (["--org", "a", "--repo-id", "a/tiny-op"], "not allowed with"),
    ],
)
def test_arguments_name_the_target(world, capsys, arguments, expected):
    import publish

    with pytest.raises(SystemExit) as error:
        publish.main(arguments, world.roots["again"])
    assert error.value.code == 2 and expected in capsys.readouterr().err


def test_repository_of_another_name(world):
    import publish

    root = world.roots["three"]
    options = publish.parse(["--repo-id", "me/other", "--kernel", NAME])
    assert publish.choose(options, root) == {NAME: "me/other"}
    with pytest.raises(build.BuildError, match="which kernel"):
        publish.choose(publish.parse(["--repo-id", "me/other"]), root)


def spoil_metadata(key: str, value: object) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        path = root / METADATA
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return spoil


def spoil_manifest(root: Path) -> None:
    path = root / "build.toml"
    path.write_text(path.read_text().replace("version = 3", "version = 5"))
    git(root, "commit", "--quiet", "--all", "--message", "x")


def edit(path: str, text: str = "\n# changed\n") -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        (root / path).parent.mkdir(exist_ok=True)
        with open(root / path, "a") as file:
            file.write(text)

    return spoil


def commit_a_change(root: Path) -> None:
    edit("kernels/tiny/ops.py")(root)
    git(root, "commit", "--quiet", "--all", "--message", "x")


def build_dirty(root: Path) -> None:
    edit("kernels/tiny/ops.py")(root)
    build.build(root, root / "build")
    git(root, "checkout", "--quiet", "kernels/tiny/ops.py")


BUILT = f"build/{NAME}/build"
REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    "changed file": (edit("kernels/tiny/ops.py"), "ops.py: has changes not committed"),
    "changed file that is not shipped": (edit("README"), "README: is not tracked by git"),
    "untracked source": (edit("kernels/tiny/new.py"), "new.py: is not tracked by git"),
    "staged file": (lambda r: git(r, "rm", "-q", "--cached", "build.toml"), "not committed"),
    "no git": (lambda r: shutil.rmtree(r / ".git"), "no commit of a git checkout"),
    "not built": (lambda r: shutil.rmtree(r / "build"), "not built: run `make build`"),
    "built from another commit": (commit_a_change, "not what this commit builds"),
    "built from a dirty tree": (build_dirty, "not what this commit builds"),
    "other version in build.toml": (spoil_manifest, "version is 3, build.toml says 5"),
    "version": (spoil_metadata("version", 4), "version is 4, build.toml says 3"),
    "name": (spoil_metadata("name", "big-op"), "name is 'big-op', build.toml says 'tiny-op'"),
    "license": (spoil_metadata("license", "MIT"), "license is 'MIT'"),
    "backend": (spoil_metadata("backend", {"type": "tpu"}), "backend is {'type': 'tpu'}"),
    "no JSON": (lambda r: (r / METADATA).write_text("{"), "metadata.json: no JSON"),
    "digest": (edit(f"{BUILT}/torch-cpu/layers.py"), "layers.py: differs from its digest"),
    "missing file": (lambda r: (r / BUILT / "torch-tpu/_ops.py").unlink(), "_ops.py: missing"),
    "missing variant": (lambda r: shutil.rmtree(r / BUILT / "torch-tpu"), "__init__.py: missing"),
    "stray file": (edit(f"{BUILT}/torch-cpu/notes.txt"), "notes.txt: stray"),
    "stray variant": (edit(f"{BUILT}/torch-rocm/a.py"), "torch-rocm/a.py: stray"),
    "stray file beside": (edit(f"build/{NAME}/notes.txt"), "notes.txt: stray"),
    "missing card": (lambda r: (r / f"build/{NAME}/CARD.md").unlink(), "CARD.md: missing"),
}


@pytest.mark.parametrize(("spoil", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(world, copy, spoil, expected):
    spoil(copy)
    with world.hub() as hub:
        result = run(copy, hub, "--execute")
        assert hub.requests == []
    assert result.code == 1 and expected in result.err, result
    assert all(line.strip() for line in result.err.splitlines())


@pytest.mark.parametrize("name", ["changed file that is not shipped", "no git", "staged file"])
def test_allow_dirty(world, copy, name):
    REFUSALS[name][0](copy)
    if name == "staged file":
        git(copy, "add", "build.toml")
        edit("README")(copy)
    with world.hub() as hub:
        assert run(copy, hub, "--execute", "--allow-dirty").code == 0
        assert code_of(hub.repos[REPO], "v3") == world.files("again")


def test_allow_dirty_still_publishes_what_the_tree_builds(world, copy):
    edit("kernels/tiny/ops.py")(copy)
    with world.hub() as hub:
        result = run(copy, hub, "--allow-dirty")
        assert result.code == 1 and "run `make build` again" in result.err
        build.build(copy, copy / "build")
        assert run(copy, hub, "--allow-dirty").code == 0


# The public API: what is compared is source, of the published version and of this one.

SIGNATURES = [
    ("x, y", "x, y", ""),
    ("x, y", "x, y=1, *, z=2", ""),
    ("x, *, y=1", "x, y=1", ""),
    ("x, y=1", "x, *, y=1", "parameter y can no longer be passed by position"),
    ("x, y", "y, x", "parameter x is no longer number 1"),
    ("x, y", "x", "parameter y is gone"),
    ("x, y", "x, new, y", "parameter new is new and has no default"),
    ("x, y=1", "x, new=2, y=1", "parameter y is no longer number 2"),
    ("x, *, y=1", "x", "parameter y is gone"),
    ("x, y=1", "x, y", "parameter y has lost its default 1"),
    ("x, y=1", "x, y=2", "default of y was 1 and is 2"),
    ("x, y=1e-6", "x, y=0.000001", ""),
    ("x: int", "x: float", ""),
    ("x", "x, /", "parameter x can no longer be passed by name"),
    ("x, /", "renamed, /", ""),
    ("x, *rest", "x", "*rest is gone"),
    ("x, **options", "x", "**options is gone"),
    ("x", "x, *, y", "parameter y is new and has no default"),
]


def api_of(signature: str) -> dict[str, public_api.Public]:
    files = {
        "__init__.py": b"from .a import made as f\n__all__ = ['f']\n",
        "a.py": f"from .b import made\ndef other({signature}): ...\n".encode(),
        "b.py": f"def made({signature}):\n    '''Does it.'''\n".encode(),
    }
    return public_api.read_api(files.get)


@pytest.mark.parametrize(("old", "new", "expected"), SIGNATURES)
def test_signatures(old, new, expected):
    problems = public_api.compare(api_of(old), api_of(new))
    assert bool(problems) == bool(expected), problems
    assert not expected or f"f: {expected}" in problems


def test_names_kinds_and_layers():
    old = {
        "__init__.py": b"from . import layers\nx = 1\n__all__ = ['layers', 'x', 'y']\ndef y(): ...",
        "layers.py": b"class A:\n    def forward(self, x): ...\nclass _B: ...\nclass C: ...\n",
    }
    api = public_api.read_api(old.get)
    assert {name: public.what for name, public in api.items()} == {
        "layers.A": "layer", "layers.C": "layer", "x": "value", "y": "function",
    }  # fmt: skip
    new = {
        "__init__.py": b"from . import layers\n__all__ = ['layers', 'y']\ny = 2\n",
        "layers.py": b"class A:\n    def forward(self, x, z): ...\n",
    }
    assert set(public_api.compare(api, public_api.read_api(new.get))) == {
        "layers.A: parameter z is new and has no default",
        "layers.C is gone",
        "x is gone",
        "y was a function and is a value",
    }


def test_an_incompatible_change_needs_a_new_version(world, tmp_path):  # HB14
    broken = {"kernels/tiny/ops.py": CHANGES["four"]["kernels/tiny/ops.py"]}
    root = make_release(tmp_path / "repo", broken)
    with world.hub() as hub:
        for arguments in ([], ["--execute"]):
            result = run(root, hub, *arguments)
            assert result.code == 1 and hub.writes() == []
            assert "tiny-op: double: parameter x is gone; users of version 3" in result.err
            assert "set version = 4 in build.toml" in result.err
        assert run(world.roots["four"], hub, "--execute").code == 0
        assert code_of(hub.repos[REPO], "v3") == world.files("three")
        assert code_of(hub.repos[REPO], "v4") == world.files("four")


def test_published_source_is_never_run(world, tmp_path):
    with world.hub() as hub:
        repo: Repo = hub.repos[REPO]
        path = "build/torch-cpu/__init__.py"
        trap = f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(7)\n".encode()
        repo.commit("v3", repo.files("v3") | {path: trap + repo.files("v3")[path]})
        assert run(world.roots["again"], hub, "--execute").code == 0
        assert code_of(repo, "v3") == world.files("again")
    assert not (tmp_path / "ran").exists()


def test_published_source_that_cannot_be_read_is_a_warning(world):
    with world.hub() as hub:
        repo: Repo = hub.repos[REPO]
        repo.commit("v3", repo.files("v3") | {"build/torch-cpu/__init__.py": b"def f(:\n"})
        result = run(world.roots["again"], hub, "--execute")
        assert result.code == 0 and "the published v3 was not compared" in result.err
