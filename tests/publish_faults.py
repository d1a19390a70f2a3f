"""Every fault that publishing is tested with, and what must come of it; renders docs/faults.md.

    python tests/publish_faults.py > docs/faults.md

test_publish_faults.py runs each of them: the first run ends as said here, users of the old versions
get the same bytes before and after, a second run finishes the job, a third changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from local_hub import Fault, LocalHub

REPO = "org/tiny-op"
DONE, REFUSED, LOGIN, PERMISSION, CONFLICT, UNAVAILABLE = 0, 1, 3, 4, 5, 6

# What is published over what: `again` replaces the published version 3, `four` adds version 4, and
# `first` goes into a repository that does not exist yet.
UPDATE, BUMP, FIRST = "again", "four", "first"


@dataclass(frozen=True)
class Case:
    """Publishing `release` while `faults` happen ends with exit code `code`."""

    name: str
    release: str
    faults: Callable[[], list[Fault]]
    code: int
    says: str = ""  # somewhere in what the run prints
    is_published: bool | None = None  # the code, after the first run; None: as `code` says
    num_commits: int = 1  # on the version branch, when all is done

    @property
    def is_done(self) -> bool:
        return self.code == DONE if self.is_published is None else self.is_published


def once(match: str, what: str, **options: object) -> Callable[[], list[Fault]]:
    return lambda: [Fault(match, what, **options)]


def always(match: str, what: str, **options: object) -> Callable[[], list[Fault]]:
    return lambda: [Fault(match, what, times=10**6, **options)]


# name, release whose publishing sends it, request
REQUESTS = (
    ("whoami", UPDATE, "GET /api/whoami-v2"),
    ("reading the branches", UPDATE, "GET /api/kernels/[^/]+/[^/]+/refs"),
    ("listing the branch", UPDATE, "GET /api/kernels/.*/tree/"),
    ("reading a published file", UPDATE, "GET /kernels/.*/resolve/"),
    ("creating the repository", FIRST, "POST /api/repos/create"),
    ("creating the branch", BUMP, "POST /api/kernels/.*/branch/v4"),
    ("announcing the files", UPDATE, "POST /api/kernels/.*/preupload/v3"),
    ("the commit", UPDATE, "POST /api/kernels/.*/commit/v3"),
    ("checking the README", UPDATE, "POST /api/validate-yaml"),
    ("announcing the README", UPDATE, "POST /api/kernels/.*/preupload/main"),
    ("the commit of the README", UPDATE, "POST /api/kernels/.*/commit/main"),
)
REFS, COMMIT, README = REQUESTS[1][2], REQUESTS[7][2], REQUESTS[10][2]


def push_something(hub: LocalHub) -> None:
    files = hub.repos[REPO].files("v3")
    hub.repos[REPO].commit("v3", files | {"build/torch-cpu/__init__.py": b"theirs = 1\n"}, "theirs")


def touch_readme(hub: LocalHub) -> None:
    hub.repos[REPO].commit("main", hub.repos[REPO].files("main") | {"README.md": b"mine"}, "mine")


CASES = [
    *(
        Case(f"connection dropped before {name}", release, once(request, "drop before"), DONE)
        for name, release, request in REQUESTS
    ),
    *(
        Case(f"connection dropped after {name}", release, once(request, "drop after"), DONE)
        for name, release, request in REQUESTS
    ),
    Case(
        "connection dropped before every commit", UPDATE, always(COMMIT, "drop before"),
        UNAVAILABLE, "run again, nothing is lost",
    ),
    Case(
        "connection dropped after every commit of the README", UPDATE, always(README, "drop after"),
        DONE,
    ),
    Case(
        "the Hub shows the old head after the commit", UPDATE, once(REFS, "replay", skip=2), DONE,
        "does not show its new commit yet",
    ),
    Case(
        "the Hub does not show the new branch yet", BUMP, once(REFS, "replay", skip=1), DONE,
        "does not show the branch yet",
    ),
    Case("a web page with 200: whoami", UPDATE, once(REQUESTS[0][2], "garble", status=200), DONE),
    Case("a web page with 200: the branches", UPDATE, once(REFS, "garble", status=200), DONE),
    Case(
        "a web page with 502: checking the README", UPDATE,
        once(REQUESTS[8][2], "garble", status=502, skip=1), DONE,
    ),
    Case("a web page with 200: the commit", UPDATE, once(COMMIT, "garble", status=200), DONE),
    Case("answer cut short: a published file", UPDATE, once(REQUESTS[3][2], "truncate"), DONE),
    Case("answer cut short: the commit", UPDATE, once(COMMIT, "truncate"), DONE),
    Case("no answer: reading the branches", UPDATE, once(REFS, "hang before"), DONE),
    Case("no answer: the commit, not done", UPDATE, once(COMMIT, "hang before"), DONE),
    Case("no answer: the commit, done", UPDATE, once(COMMIT, "hang after"), DONE),
    Case(
        "401 whoami", UPDATE, always("GET /api/whoami-v2", "refuse", status=401), LOGIN,
        "set HF_TOKEN to a token with write permission",
    ),
    Case(
        "401 the commit (token revoked meanwhile)", UPDATE, always(COMMIT, "refuse", status=401),
        LOGIN, "the token was refused",
    ),
    Case(
        "403 creating the repository", FIRST, always(REQUESTS[4][2], "refuse", status=403),
        PERMISSION, "to ask for that access open a discussion",
    ),
    Case(
        "403 creating the branch", BUMP, always(REQUESTS[5][2], "refuse", status=403), PERMISSION,
        "your token may not write to org/tiny-op",
    ),
    Case(
        "403 the commit", UPDATE, always(COMMIT, "refuse", status=403), PERMISSION,
        "your token may not write to org/tiny-op",
    ),
    Case(
        "403 the commit of the README", UPDATE, always(README, "refuse", status=403), PERMISSION,
        "your token may not write to org/tiny-op", is_published=True,
    ),
    Case("404 the commit", UPDATE, once(COMMIT, "refuse", status=404), REFUSED, "HTTP 404"),
    Case(
        "409 the repository appeared meanwhile", FIRST,
        once(REQUESTS[4][2], "race", action=lambda hub: hub.add_repo(REPO)), DONE,
    ),
    Case(
        "409 the branch appeared meanwhile", BUMP,
        once(REQUESTS[5][2], "race", action=lambda hub: hub.add_branch(REPO, "v4")), DONE,
    ),
    Case("409 the commit", UPDATE, once(COMMIT, "refuse", status=409), DONE, "HTTP 409"),
    Case("412 the commit, for no reason", UPDATE, once(COMMIT, "refuse", status=412), DONE),
    Case(
        "412 every commit", UPDATE, always(COMMIT, "refuse", status=412), UNAVAILABLE, "HTTP 412",
    ),
    Case(
        "412 somebody pushed other code", UPDATE, once(COMMIT, "race", action=push_something),
        CONFLICT, "somebody pushed", num_commits=2,
    ),
    Case(
        "somebody pushed other code before the commit", UPDATE,
        once(REQUESTS[6][2], "race", action=push_something), CONFLICT, "somebody pushed",
        num_commits=2,
    ),
    Case(
        "412 somebody edited the README", UPDATE, once(README, "race", action=touch_readme),
        CONFLICT, "somebody pushed", is_published=True,
    ),
    Case(
        "429 the commit, Retry-After: 0", UPDATE,
        once(COMMIT, "refuse", status=429, headers={"Retry-After": "0"}), DONE, "again in 0 s",
    ),
    Case("429 whoami, no Retry-After", UPDATE, once(REQUESTS[0][2], "refuse", status=429), DONE),
    Case(
        "429 the commit, Retry-After: an hour", UPDATE,
        always(COMMIT, "refuse", status=429, headers={"Retry-After": "3600"}), UNAVAILABLE,
        "the Hub asks to come back in 3600 s",
    ),
    Case("503 reading the branches", UPDATE, once(REFS, "refuse", status=503), DONE),
    Case("503 creating the repository", FIRST, once(REQUESTS[4][2], "refuse", status=503), DONE),
    Case("503 creating the branch", BUMP, once(REQUESTS[5][2], "refuse", status=503), DONE),
    Case("503 the commit, not done", UPDATE, once(COMMIT, "refuse", status=503), DONE),
    Case("503 the commit, but done", UPDATE, once(COMMIT, "lose", status=503), DONE),
    Case(
        "503 every request", UPDATE, always(".", "refuse", status=503), UNAVAILABLE,
        "the Hub stayed busy or out of reach",
    ),
    Case(
        "503 every commit of the README", UPDATE, always(README, "refuse", status=503),
        UNAVAILABLE, "run again", is_published=True,
    ),
    Case(
        "400 the README is refused", UPDATE, once(REQUESTS[8][2], "refuse", status=400), REFUSED,
        "README",
    ),
]  # fmt: skip

# name, after which request the process is killed, whether that request is carried out
KILLS = (
    ("killed before the branch is created", BUMP, REQUESTS[5][2], "hang before"),
    ("killed between branch and commit", BUMP, REQUESTS[5][2], "hang after"),
    ("killed before the commit", UPDATE, COMMIT, "hang before"),
    ("killed between commit and README", UPDATE, COMMIT, "hang after"),
    ("killed after the README", UPDATE, README, "hang after"),
)
# name, what the build says
BUILD_FAULTS = (
    ("disk full while a build is written", "No space left on device"),
    ("disk full while a build is put in place", "No space left on device"),
    ("a file larger than the limit (RLIMIT_FSIZE)", "File too large"),
    ("a build killed while it writes", "killed"),
)
EXIT = {
    DONE: "0, finished",
    REFUSED: "1, refused",
    LOGIN: "3, log in",
    PERMISSION: "4, ask for access",
    CONFLICT: "5, somebody else pushed",
    UNAVAILABLE: "6, come back later",
}
WHAT = {
    UPDATE: "an update of version 3",
    BUMP: "version 4",
    FIRST: "a new repository",
}

INTRODUCTION = """# What happens when publishing goes wrong

Written by `python tests/publish_faults.py`; `tests/test_publish_faults.py` runs every line against
a Hub on this machine. After every first run the old versions give the same bytes as before, and
every version branch holds one release whole, the old or the new, or what somebody else pushed
meanwhile, which is never overwritten unseen (a new branch may still be empty:
`kernels` then says that a newer version exists, and loads the one that was asked for). In every
line a second run finishes the job and a third one writes nothing.
"""


def render() -> str:
    rows = []
    for case in CASES:
        left = "new" if case.is_done else "old" if case.num_commits == 1 else "theirs"
        rows.append((case.name, WHAT[case.release], EXIT[case.code], left))
    concurrent = "two publish the same at once"
    rows.append((concurrent, WHAT[UPDATE], "0, both finished with one commit", "new"))
    for name, release, request, what in KILLS:
        is_new = what == "hang after" and "branch" not in request
        rows.append((name, WHAT[release], "killed", "new" if is_new else "old"))
    rows += [(name, "a build", f"1, {said}", "old") for name, said in BUILD_FAULTS[:3]]
    rows += [(name, "a build", said, "old") for name, said in BUILD_FAULTS[3:]]
    head = "| fault | during | first run | code on the Hub then |\n|---|---|---|---|\n"
    lines = [f"| {number}. {' | '.join(row)} |" for number, row in enumerate(rows, 1)]
    return f"{INTRODUCTION}\n{head}" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
