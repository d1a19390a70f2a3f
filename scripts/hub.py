"""One kernel repository on the Hub: reads and writes that survive a bad network.

Every request is repeated after a pause when the Hub is busy (408, 429, 5xx) or the connection
fails, Retry-After honoured; every other refusal becomes a `HubError` that says what to do. Writes
are safe to repeat: `push` reads the branch before each try, commits the difference on that very
parent, and is done when nothing differs, so it does not matter whether a lost answer stood for a
commit.
"""

from __future__ import annotations

import email.utils
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_session,
    hf_hub_url,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

LOGIN, PERMISSION, CONFLICT, UNAVAILABLE = 3, 4, 5, 6  # exit codes
BUSY = {408, 429, 500, 502, 503, 504}
# no connection, a refusal, or a page of some proxy where JSON should be
FAILURES = (httpx2.TransportError, HfHubHTTPError, json.JSONDecodeError)
LONGEST_WAIT_SECONDS = 900
SIGNATURE = ".sigstore"  # beside the file that it signs
ASK_FOR_ACCESS = "https://huggingface.co/spaces/kernels-community/README/discussions/new"
T = TypeVar("T")


class HubError(Exception):
    """The Hub said no; `code` is the exit code, `problems` one line each."""

    def __init__(self, code: int, *problems: str):
        super().__init__("\n".join(problems))
        self.code, self.problems = code, problems


class _MovedError(Exception):
    """The branch is not where it was read."""


@dataclass(frozen=True)
class Difference:
    """What a commit changes, by path."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    deleted: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.deleted)

    def __str__(self) -> str:
        counts = (len(self.added), len(self.changed), len(self.deleted))
        return "{} added, {} changed, {} deleted".format(*counts)


@dataclass(frozen=True)
class Patience:
    """How long to try: the first pause doubles every time."""

    first_pause_seconds: float = 1.0
    num_tries: int = 6
    timeout_seconds: float = 60.0


def oids(data: bytes) -> tuple[str, str]:
    """The ids that a listing of the Hub can give a file: git's, and that of large files."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), sha256(data).hexdigest()


@dataclass(frozen=True)
class Target:
    """The files that a branch shall hold, and which of its paths are ours to delete."""

    wanted: dict[str, bytes]
    owns: Callable[[str], bool]

    def difference(self, listing: dict[str, str]) -> Difference:
        """From a branch with `listing` (path -> oid) to this."""
        both = self.wanted.keys() & listing.keys()
        changed = {path for path in both if listing[path] not in oids(self.wanted[path])}
        stale = {path for path in listing.keys() - self.wanted.keys() if self.owns(path)}
        for path in changed | stale:  # a signature never comes out twice the same
            signed = path.removesuffix(SIGNATURE)
            if signed != path and signed in both - changed:
                changed, stale = changed - {path}, stale - {path}
        return Difference(
            added=tuple(sorted(self.wanted.keys() - listing.keys())),
            changed=tuple(sorted(changed)),
            deleted=tuple(sorted(stale)),
        )


class Hub:
    """The repository `repo_id` of type kernel."""

    def __init__(self, repo_id: str, api: HfApi, patience: Patience, say: Callable[[str], None]):
        self.repo_id, self.api, self.patience, self.say = repo_id, api, patience, say
        self._options = {"repo_id": repo_id, "repo_type": "kernel"}

    def whoami(self) -> dict[str, Any]:
        return self._try("whoami", self.api.whoami)

    def heads(self) -> dict[str, str] | None:
        """Branch -> commit; None when the repository does not exist."""
        try:
            refs = self._try("reading branches", self.api.list_repo_refs, **self._options)
        except RepositoryNotFoundError:
            return None
        return {branch.name: branch.target_commit for branch in refs.branches}

    def create(self) -> None:
        def create() -> None:
            try:
                self.api.create_repo(**self._options)
            except HfHubHTTPError as error:
                if error.response.status_code != 409:  # there already: created by a lost answer
                    raise

        self._try("creating the repository", create)

    def create_branch(self, branch: str, start: str) -> None:
        options = {**self._options, "branch": branch, "revision": start, "exist_ok": True}
        self._try(f"creating branch {branch}", self.api.create_branch, **options)

    def listing(self, commit: str) -> dict[str, str]:
        """Path -> oid of every file of a commit."""

        def read() -> dict[str, str]:
            tree = self.api.list_repo_tree(**self._options, revision=commit, recursive=True)
            files = (entry for entry in tree if isinstance(entry, RepoFile))
            return {f.path: f.lfs.sha256 if f.lfs else f.blob_id for f in files}

        return self._try(f"listing {commit[:7]}", read)

    def read(self, commit: str, path: str, oid: str) -> bytes:
        """One file of a commit, past every cache."""
        where = {"repo_type": "kernel", "revision": commit, "endpoint": self.api.endpoint}
        url = hf_hub_url(self.repo_id, path, **where)

        def read() -> bytes:
            answer = get_session().get(url, headers=build_hf_headers(token=self.api.token))
            hf_raise_for_status(answer)
            if oid not in oids(answer.content):
                raise httpx2.RemoteProtocolError("the file arrived damaged")
            return answer.content

        return self._try(f"reading {path}", read)

    def check_readme(self, readme: bytes) -> None:
        """HubError when the Hub would refuse the front matter, before anything is uploaded."""
        body = {"content": readme.decode(), "repoType": "kernel"}

        def check() -> None:
            url = f"{self.api.endpoint}/api/validate-yaml"
            headers = build_hf_headers(token=self.api.token)
            hf_raise_for_status(get_session().post(url, json=body, headers=headers))

        self._try("checking README.md", check)

    def push(self, branch: str, head: str, target: Target, message: str) -> str | None:
        """Makes the files that `target` owns on `branch` those that it wants, in one commit.

        `head` is the commit of the branch that the caller has looked at. Returns the new commit, or
        None when there was nothing to change. A branch that somebody else moves meanwhile to other
        content is a conflict: what was planned is no longer what would happen.
        """
        expected, is_sent, num_failures = head, False, 0
        while True:
            now = (self.heads() or {}).get(branch)
            if now is None or (is_sent and now == head):  # read from a copy that lags behind
                num_failures += 1
                missing = "its new commit" if is_sent else "the branch"
                self._pause(num_failures, None, f"{branch}: the Hub does not show {missing} yet")
                continue
            changes = target.difference(self.listing(now))
            if not changes:
                return now if now != head else None
            if now != expected:
                problem = f"somebody pushed {now[:7]} to {branch} while this ran; look at it, then"
                raise HubError(CONFLICT, f"{self.repo_id}: {problem} run again to replace it")
            if is_sent:
                problem = f"{now[:7]} on {branch} does not hold what was sent: {changes}"
                raise HubError(UNAVAILABLE, f"{self.repo_id}: {problem}")
            try:
                expected, is_sent = self._commit(branch, now, changes, target, message), True
            except (_MovedError, *FAILURES) as error:
                # After a lost answer nobody knows whether it was done: the next turn looks.
                num_failures += 1
                self._pause(num_failures, _retry_after(error), f"commit: {_describe(error)}")

    def _commit(
        self, branch: str, head: str, changes: Difference, target: Target, message: str
    ) -> str:
        add = [CommitOperationAdd(p, target.wanted[p]) for p in (*changes.added, *changes.changed)]
        get_session().timeout = self.patience.timeout_seconds
        try:
            done = self.api.create_commit(
                **self._options,
                operations=[*(CommitOperationDelete(path) for path in changes.deleted), *add],
                commit_message=message,
                revision=branch,
                parent_commit=head,
            )
            return done.oid
        except HfHubHTTPError as error:
            if error.response.status_code in (409, 412):
                raise _MovedError(_describe(error)) from None
            if error.response.status_code in BUSY:
                raise
            raise self._refusal(f"commit on {branch}", error) from None
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # huggingface_hub's word for a README that the Hub refuses
            raise HubError(1, f"{self.repo_id}: {' '.join(str(error).split())}") from None

    def _try(self, what: str, call: Callable[..., T], **options: Any) -> T:
        num_failures = 0
        while True:
            get_session().timeout = self.patience.timeout_seconds
            try:
                return call(**options)
            except RepositoryNotFoundError:
                raise
            except LocalTokenNotFoundError:
                raise HubError(LOGIN, f"not logged in: {_HOW_TO_LOG_IN}") from None
            except OfflineModeIsEnabled:
                problem = "HF_HUB_OFFLINE is set, so the Hub cannot be reached: unset it"
                raise HubError(UNAVAILABLE, problem) from None
            except FAILURES as error:
                response = getattr(error, "response", None)
                if response is not None and response.status_code not in BUSY:
                    raise self._refusal(what, error) from None
                num_failures += 1
                self._pause(num_failures, _retry_after(error), f"{what}: {_describe(error)}")

    def _pause(self, num_failures: int, retry_after: float | None, reason: str) -> None:
        if num_failures >= self.patience.num_tries:
            raise HubError(UNAVAILABLE, f"{self.repo_id}: {reason}; {_TRY_LATER}")
        pause = self.patience.first_pause_seconds * 2 ** (num_failures - 1)
        pause = pause if retry_after is None else retry_after
        if pause > LONGEST_WAIT_SECONDS:
            problem = f"{self.repo_id}: {reason}; the Hub asks to come back in {pause:.0f} s"
            raise HubError(UNAVAILABLE, problem)
        self.say(f"  {reason}; again in {pause:g} s")
        time.sleep(pause)

    def _refusal(self, what: str, error: HfHubHTTPError) -> HubError:
        status, said = error.response.status_code, _describe(error)
        if status == 401:
            return HubError(LOGIN, f"{what}: {said}", f"the token was refused: {_HOW_TO_LOG_IN}")
        if status == 403:
            org = self.repo_id.split("/")[0]
            return HubError(
                PERMISSION,
                f"{what}: {said}",
                f"your token may not write to {self.repo_id}: it needs write permission, your "
                f"account a role in {org} that may write, and {org} access to publish kernels",
                f"to ask for that access open a discussion at {ASK_FOR_ACCESS}, with the source, "
                "the purpose and benchmark numbers of the kernel",
            )
        return HubError(1, f"{self.repo_id}: {what}: {said}")


_HOW_TO_LOG_IN = (
    "set HF_TOKEN to a token with write permission (https://huggingface.co/settings/tokens), "
    "or run `hf auth login`"
)
_TRY_LATER = "the Hub stayed busy or out of reach; run again, nothing is lost"


def _describe(error: Exception) -> str:
    response = getattr(error, "response", None)
    said = getattr(error, "server_message", None) or ("" if response is not None else str(error))
    status = f"HTTP {response.status_code}" if response is not None else "no answer"
    return f"{status}: {' '.join(said.split())[:200]}" if said else status


def _retry_after(error: Exception) -> float | None:
    """Seconds that the Hub asks to wait: Retry-After, as a number or a date."""
    response = getattr(error, "response", None)
    value = response.headers.get("Retry-After", "").strip() if response is not None else ""
    if value.isdigit():
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, date.timestamp() - time.time())
