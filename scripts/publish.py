"""Publishes what `make build` built to the Kernels Hub, or says why not.

    python scripts/publish.py --org ORG                # the plan for all kernels; changes nothing
    python scripts/publish.py --org ORG --execute      # carries it out (HF_TOKEN, HF_ENDPOINT)
    python scripts/publish.py --repo-id ORG/NAME       # one kernel, whose repository has this name

All kernels are checked, locally and against the Hub, before the first upload. Per kernel: the
repository if it is new; the branch v<version> if it is new, from main; build/ and benchmarks/ in
one commit on that branch, on the parent that the plan has looked at, stale files deleted; last the
README on main. A run that was cut off is finished by running it again; a second run does nothing.

Exit codes:
    0  done, nothing to do, or a plan printed
    1  refused, here or by the Hub; one problem per line on stderr
    2  wrong arguments
    3  not logged in, or the token was refused
    4  the account or organisation may not publish there
    5  somebody else pushed meanwhile; look, and run again
    6  the Hub stayed busy or out of reach; run again
    130  interrupted; run again
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hub import CONFLICT, UNAVAILABLE, Difference, Hub, HubError, Patience, Target
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from manifest import BuildError, read_checkout, read_manifest
from public_api import Public, compare, read_api
from release import Release, prepare
from tree import ROOT

REFUSED, INTERRUPTED = 1, 130


@dataclass(frozen=True)
class Plan:
    """What publishing one release changes; `heads` are the branches it was made for."""

    release: Release
    hub: Hub
    heads: dict[str, str] | None  # None: the repository does not exist
    code: Target
    code_changes: Difference
    readme: Target
    readme_changes: Difference | None  # None: main describes a newer version

    def __bool__(self) -> bool:
        return bool(self.code_changes or self.readme_changes)


def make_plan(release: Release, hub: Hub, heads: dict[str, str] | None) -> Plan:
    """Reads the branches in `heads`, and refuses an incompatible change of the public API."""
    known = heads or {}
    code = Target(release.files, owns=lambda path: path.startswith(("build/", "benchmarks/")))
    readme = Target({"README.md": release.readme}, owns=lambda path: path == "README.md")
    listing = {}
    if release.branch in known:
        listing = hub.listing(known[release.branch])
        _check_api(release, hub, known[release.branch], listing)
    readme_changes = None
    if release.kernel.version >= max(_versions(known), default=0):
        readme_changes = readme.difference(hub.listing(known["main"]) if "main" in known else {})
    return Plan(release, hub, heads, code, code.difference(listing), readme, readme_changes)


def _versions(branches: dict[str, str]) -> list[int]:
    return [int(name[1:]) for name in branches if name[:1] == "v" and name[1:].isdigit()]


def _check_api(release: Release, hub: Hub, head: str, listing: dict[str, str]) -> None:
    """HubError when calls that work with the published version would fail or change."""
    inits = sorted(path for path in listing if re.fullmatch(r"build/[^/]+/__init__\.py", path))
    if not inits:
        return  # a branch whose first upload was cut off

    @functools.cache
    def read(path: str) -> bytes | None:
        where = inits[0].removesuffix("__init__.py") + path
        return hub.read(head, where, listing[where]) if where in listing else None

    try:
        published: dict[str, Public] = read_api(read)
    except (LookupError, SyntaxError, ValueError) as error:
        warn(f"{hub.repo_id}: the published {release.branch} was not compared: {error}")
        return
    problems = compare(published, release.api())
    if problems:
        name, number = release.kernel.name, release.kernel.version
        bump = f"users of version {number} would break: set version = {number + 1}"
        raise HubError(REFUSED, *(f"{name}: {p}; {bump} in build.toml" for p in problems))


def show(plan: Plan) -> None:
    release, heads = plan.release, plan.heads
    is_new = "a new repository" if heads is None else "exists"
    say(f"{release.kernel.name}: kernel repository {release.repo_id} ({is_new})")
    branch = "" if release.branch in (heads or {}) else ", a new branch from main"
    _show_changes(f"branch {release.branch}{branch}", plan.code_changes)
    if plan.readme_changes is None:
        say("  branch main: README.md stays that of a newer version")
    else:
        _show_changes("branch main", plan.readme_changes)


def _show_changes(where: str, changes: Difference) -> None:
    say(f"  {where}: {changes if changes else 'nothing to change'}")
    for mark, paths in (("+", changes.added), ("~", changes.changed), ("-", changes.deleted)):
        for path in paths:
            say(f"    {mark} {path}")


def execute(plan: Plan, commit: str | None) -> None:
    """Carries out the plan; every step is one that a second run may find done."""
    release, hub, heads = plan.release, plan.hub, plan.heads
    branch = release.branch
    if not plan:
        say(f"{release.repo_id}: up to date")
        return
    if heads is None:
        say(f"{release.repo_id}: creating the repository")
        hub.create()
        heads = hub.heads() or {}
    if "main" not in heads:
        raise HubError(CONFLICT, f"{release.repo_id}: has no branch main to start from")
    if branch not in heads:
        say(f"{release.repo_id}: creating branch {branch}")
        hub.create_branch(branch, heads["main"])
    source = f" from {commit[:12]}" if commit else ""
    message = f"{release.kernel.name} {branch}{source}"
    steps = [(branch, heads.get(branch, heads["main"]), plan.code, plan.code_changes)]
    if plan.readme_changes is not None:
        steps.append(("main", heads["main"], plan.readme, plan.readme_changes))
    for name, head, target, changes in steps:
        if changes:
            start = time.monotonic()
            num_bytes = sum(len(target.wanted[path]) for path in changes.added + changes.changed)
            say(f"{release.repo_id}: {name}: {changes}, {num_bytes / 1000:.0f} kB to upload ...")
            done = hub.push(name, head, target, message)
            seconds = time.monotonic() - start
            say(f"{release.repo_id}: {name} is at {(done or head)[:12]} ({seconds:.1f} s)")


def say(text: str) -> None:
    print(text, flush=True)


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    description, epilog = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--repo-id", metavar="ORG/NAME", help="where one kernel goes")
    target.add_argument("--org", help="where all kernels go, under their own names")
    parser.add_argument("--kernel", metavar="NAME", help="Hub name of the one kernel to publish")
    parser.add_argument("--execute", action="store_true", help="upload; without it only plan")
    parser.add_argument(
        "--allow-dirty", action="store_true", help="publish from a tree with uncommitted changes"
    )
    parser.add_argument("--build", type=Path, default=None, help="default: build/ of the tree")
    parser.add_argument("--tries", type=int, default=6, help="per request (default: %(default)s)")
    parser.add_argument(
        "--first-pause", type=float, default=1.0, metavar="SECONDS",
        help="before the second try; doubles every time (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS",
        help="for one answer of the Hub (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    for name, value, slashes in (("--repo-id", options.repo_id, 1), ("--org", options.org, 0)):
        parts = (value or "").split("/")
        if value is not None and (len(parts) != slashes + 1 or not all(parts)):
            parser.error(f"{name} must look like {'ORG/NAME' if slashes else 'ORG'}, got {value}")
    return options


def choose(options: argparse.Namespace, root: Path) -> dict[str, str]:
    """Hub name -> repository."""
    kernels = read_manifest(root)
    if options.repo_id is not None:
        name = options.kernel or options.repo_id.split("/")[1]
        if name not in kernels and options.kernel is None:
            known = ", ".join(kernels)
            problem = f"{options.repo_id}: which kernel? Add --kernel with one of {known}"
            raise BuildError([problem])
        return {name: options.repo_id}
    names = kernels if options.kernel is None else [options.kernel]
    return {name: f"{options.org}/{name}" for name in names}


def run(options: argparse.Namespace, root: Path) -> None:
    releases = prepare(
        root, options.build or root / "build", choose(options, root), options.allow_dirty
    )
    if any(release.kernel.source is None for release in releases):
        warn("build.toml [general] names no source, so users see no link to the code")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    patience = Patience(options.first_pause, options.tries, options.timeout)
    hubs = [Hub(release.repo_id, api, patience, say) for release in releases]
    if options.execute:
        say(f"publishing as {hubs[0].whoami()['name']}")
    pairs = list(zip(releases, hubs, strict=True))
    try:
        plans = [make_plan(release, hub, hub.heads()) for release, hub in pairs]
    except HubError as error:
        if options.execute or error.code != UNAVAILABLE:
            raise
        for problem in error.problems:
            warn(f"{problem} The plan below is for repositories that do not exist yet.")
        plans = [make_plan(release, hub, None) for release, hub in pairs]
    for plan in plans:
        show(plan)
    if not options.execute:
        say("nothing was uploaded: this was the plan, --execute carries it out")
        return
    for plan in plans:
        if plan.readme_changes:
            plan.hub.check_readme(plan.release.readme)
    commit = read_checkout(root).commit
    for plan in plans:
        execute(plan, commit)


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    options = parse(arguments)
    try:
        run(options, root)
    except (BuildError, HubError) as error:
        print("\n".join(error.problems), file=sys.stderr)
        return getattr(error, "code", REFUSED)
    except RepositoryNotFoundError:
        print("the repository is gone, or your token may not see it", file=sys.stderr)
        return CONFLICT
    except OSError as error:
        print(f"{error.filename}: {error.strerror}" if error.filename else error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted; run again to finish", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
