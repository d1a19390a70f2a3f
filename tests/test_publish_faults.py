"""Publishing under every fault of publish_faults.py: nobody is harmed, a second run finishes."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import publish_faults as faults
import pytest
from huggingface_hub import snapshot_download
from local_hub import Fault, LocalHub, Repo
from publish_faults import CASES, CONFLICT, DONE, FIRST, KILLS, Case
from publish_world import REPO, Result, World, code_of, run, start
from tiny_kernel import ROOT, build, make_repository, read_files

BRANCHES = {"again": "v3", "four": "v4", FIRST: "v3"}
BEFORE = {"again": "three", "four": None, FIRST: None}  # what the branch holds already


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("releases"))


class Watch:
    """A Hub, what users of the published versions get from it, and the release that comes next."""

    def __init__(self, world: World, hub: LocalHub, release: str, folder: Path):
        self.world, self.hub, self.release, self.folder = world, hub, release, folder
        self.root = world.roots["three" if release == FIRST else release]
        self.branch = BRANCHES[release]
        self.new = world.files("three" if release == FIRST else release)
        self.old = world.files(BEFORE[release]) if BEFORE[release] else {}
        self.new_readme = world.readme("three" if release == FIRST else release)
        self.published = {} if release == FIRST else dict(hub.repos[REPO].branches)

    def repo(self) -> Repo:
        return self.hub.repos.get(REPO, Repo())

    def publish(self) -> Result:
        return run(self.root, self.hub, "--execute")

    def check_unharmed(self) -> None:
        """The old commits give the same bytes; a version branch holds one release, whole."""
        for branch, head in self.published.items():
            assert self.repo().commits[head] == self.world.repos[REPO].commits[head]
            if branch not in (self.branch, "main"):
                assert self.repo().branches[branch] == head
        if self.branch in self.repo().branches:
            files = code_of(self.repo(), self.branch)
            theirs = self.old | {"build/torch-cpu/__init__.py": b"theirs = 1\n"}
            assert files in (self.old, self.new, theirs)

    def check_snapshot(self, number: int) -> None:
        """What huggingface_hub downloads of version 3 as it was published."""
        if self.published:
            folder = snapshot_download(
                REPO,
                repo_type="kernel",
                revision=self.published["v3"],
                endpoint=self.hub.url,
                cache_dir=self.folder / f"cache{number}",
            )
            found = read_files(Path(folder))
            assert {p: d for p, d in found.items() if p in self.world.files("three")} == (
                self.world.files("three")
            )

    def is_new(self) -> bool:
        repo = self.repo()
        return self.branch in repo.branches and code_of(repo, self.branch) == self.new

    def is_readme_new(self) -> bool:
        repo = self.repo()
        return "main" in repo.branches and repo.files("main").get("README.md") == self.new_readme

    def check_finished(self, num_commits: int) -> None:
        assert self.is_new() and self.is_readme_new()
        start = self.published.get(self.branch)
        history = self.repo().history(self.branch)
        before = history.index(start) if start else len(history) - self.num_on_main()
        assert before == num_commits

    def num_on_main(self) -> int:
        main = self.repo().history("main")
        return len([sha for sha in self.repo().history(self.branch) if sha in main])

    def finish(self, num_commits: int = 1) -> None:
        """A second run finishes the job, a third writes nothing."""
        self.hub.faults.clear()
        result = self.publish()
        assert result.code == DONE, result
        self.check_finished(num_commits)
        self.hub.requests.clear()
        result = self.publish()
        assert result.code == DONE and "up to date" in result.out
        assert self.hub.writes() == []
        self.check_unharmed()


@pytest.fixture
def watch(world, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hubs = []

    def begin(release: str) -> Watch:
        hub = LocalHub() if release == FIRST else world.hub()
        hubs.append(hub)
        return Watch(world, hub.__enter__(), release, tmp_path)

    yield begin
    for hub in hubs:
        hub.__exit__()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_fault(watch, case: Case):
    seen = watch(case.release)
    planted = case.faults()
    seen.hub.fail(*planted)
    result = seen.publish()
    assert all(fault.num_hits for fault in planted), "the fault never happened"
    assert (result.code, case.says in result.out + result.err) == (case.code, True), result
    assert (result.code == DONE) == (not result.err.replace(WARNING, ""))
    assert seen.is_new() == case.is_done
    assert not seen.is_readme_new() or seen.is_new(), "the README ran ahead of the code"
    seen.check_unharmed()
    seen.hub.faults.clear()
    seen.check_snapshot(1)
    seen.finish(case.num_commits)
    seen.check_snapshot(2)


WARNING = "warning: build.toml [general] names no source, so users see no link to the code\n"


def test_two_publish_the_same_at_once(watch):
    seen = watch("again")
    barrier = threading.Barrier(2)
    meet = Fault(faults.COMMIT, "race", times=2, action=lambda hub: barrier.wait(10))
    seen.hub.fail(meet)
    processes = [start(seen.root, seen.hub) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [DONE, DONE], errors
    assert meet.num_hits >= 2, "they did not meet"
    assert seen.is_new()
    seen.check_unharmed()
    seen.finish()


@pytest.mark.parametrize(("name", "release", "request_", "what"), KILLS, ids=[k[0] for k in KILLS])
def test_killed(watch, name, release, request_, what):
    seen = watch(release)
    fault = Fault(request_, what)
    seen.hub.fail(fault)
    process = start(seen.root, seen.hub)
    assert fault.is_hanging.wait(30), "the request never came"
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert seen.is_new() == (what == "hang after" and "branch" not in request_)
    assert not seen.is_readme_new() or request_ == faults.README
    seen.check_unharmed()
    seen.check_snapshot(1)
    seen.finish()


def test_a_conflict_shows_whose_commit_it_was(watch):
    seen = watch("again")
    seen.hub.fail(Fault(faults.COMMIT, "race", action=faults.push_something))
    result = seen.publish()
    theirs = seen.repo().branches["v3"]
    assert result.code == CONFLICT and theirs[:7] in result.err
    assert "build/torch-cpu/__init__.py" in seen.repo().files("v3")  # not overwritten unseen


def test_the_table_is_that_of_the_cases():
    assert (ROOT / "docs" / "faults.md").read_text() == faults.render()
    num_faults = len(CASES) + len(KILLS) + len(faults.BUILD_FAULTS) + 1
    assert num_faults == faults.render().count("\n| ") - 1 >= 25


# The build: an error leaves the old one in place, and nothing else.


@pytest.fixture
def built(tmp_path) -> tuple[Path, Path, dict[str, bytes]]:
    """A repository changed since it was built, its builds, and what they hold."""
    root, out = make_repository(tmp_path / "repo"), tmp_path / "out"
    build.build(root, out)
    make_repository(root, {"tpu_runtime/more.py": f"LONG = '{'x' * 20000}'\n"})
    return root, out, read_files(out)


def check_then_build(root: Path, out: Path, before: dict[str, bytes]) -> None:
    assert read_files(out) == before
    build.build(root, out)
    after = read_files(out)
    assert after != before and "tiny-op/build/torch-cpu/tpu_runtime/more.py" in after
    assert {path.split("/")[0] for path in after} == {"tiny-op"}
    assert [path.name for path in out.iterdir()] == ["tiny-op"]


@pytest.mark.parametrize("num_written", [0, 1, 7, 20])
def test_disk_full_while_a_build_is_written(built, monkeypatch, capsys, num_written):
    root, out, before = built
    write, written = Path.write_bytes, []

    def fill_up(path: Path, data: bytes) -> int:
        if len(written) == num_written:
            write(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(path)
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fill_up)
        patch.setattr(build, "ROOT", root)
        assert build.main(["--out", str(out)]) == 1
    assert faults.BUILD_FAULTS[0][1] in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["tiny-op"]
    check_then_build(root, out, before)


def test_disk_full_while_a_build_is_put_in_place(built, monkeypatch):
    root, out, before = built
    rename = Path.rename

    def fail_on_new(path: Path, target: Path) -> Path:
        if path.parent.name == "new":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_on_new)
        with pytest.raises(OSError, match=faults.BUILD_FAULTS[1][1]):
            build.build(root, out)
    check_then_build(root, out, before)


def build_in_a_process(root: Path, out: Path, line: str, **options) -> subprocess.Popen:
    paths = f"pathlib.Path({str(root)!r}), pathlib.Path({str(out)!r})"
    code = f"import build, os, pathlib, signal\n{line}\nbuild.build({paths})"
    env = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=env, stderr=pipe, **options)


def test_a_file_larger_than_the_limit(built):
    """The real thing: the kernel refuses to write on."""
    root, out, before = built

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    process = build_in_a_process(root, out, "", preexec_fn=limit)
    error = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 1 and faults.BUILD_FAULTS[2][1] in error
    check_then_build(root, out, before)


def test_a_build_killed_while_it_writes(built):
    root, out, before = built
    line = (
        "write, left = pathlib.Path.write_bytes, [9]\n"
        "def count(path, data):\n"
        "    left[0] -= 1\n"
        "    return os.kill(os.getpid(), signal.SIGKILL) if not left[0] else write(path, data)\n"
        "pathlib.Path.write_bytes = count"
    )
    process = build_in_a_process(root, out, line)
    assert process.wait(60) == -signal.SIGKILL
    assert len(list(out.iterdir())) == 2, "it had not begun to write"
    process.stderr.close()
    whole = {path: data for path, data in read_files(out).items() if path.startswith("tiny-op/")}
    assert whole == before
    build.build(root, out)
    assert [path.name for path in out.iterdir()] == ["tiny-op"]
