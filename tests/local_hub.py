"""A Hub on this machine, as far as publishing and loading kernels needs one, with faults.

    with LocalHub() as hub:
        hub.fail(Fault("POST .*/commit/v1", "drop after"))
        ...  # HF_ENDPOINT=hub.url, HF_TOKEN="writer", HF_HUB_DISABLE_XET=1

Tokens: "writer" may write everywhere, "reader" nowhere, "outsider" may write but not create; every
other token is refused. Only kernels exist; anybody may read.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKENS = {"writer": "write create", "outsider": "write", "reader": ""}
HANG_SECONDS = 3  # longer than any client of the tests waits
REPO = r"/api/kernels/(?P<repo>[^/]+/[^/]+)"


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose "METHOD path" begins with `match`.

    what: "drop before" or "drop after" the request is carried out, "hang before" or "hang after",
    "truncate" the answer, "refuse" with `status`, "lose": carried out, but answered with `status`,
    "replay": the answer is that of the last time, "garble": it is a web page with `status`, or
    "race": `action` runs just before.
    """

    match: str
    what: str
    status: int = 0
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "on purpose"
    action: Callable[[LocalHub], None] | None = None
    skip: int = 0  # let this many requests pass first
    num_hits: int = 0
    is_hanging: threading.Event = field(default_factory=threading.Event)

    def applies(self, request: str) -> bool:
        if not re.match(self.match, request):
            return False
        self.num_hits += 1
        return self.skip < self.num_hits <= self.skip + self.times


@dataclass
class Repo:
    """Branches and tags point at commits; a commit is its files and its parent."""

    commits: dict[str, tuple[dict[str, bytes], str | None]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes], message: str = "") -> str:
        parent = self.branches.get(branch)
        listed = sorted((path, oid(data)) for path, data in files.items())
        sha = hashlib.sha1(repr((parent, listed, message)).encode()).hexdigest()
        self.commits[sha] = (files, parent)
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str:
        name = revision.removeprefix("refs/heads/")
        found = self.branches.get(name) or self.tags.get(name) or revision
        if found not in self.commits:
            raise Refusal(404, "no such revision", "RevisionNotFound")
        return found

    def files(self, revision: str) -> dict[str, bytes]:
        return self.commits[self.resolve(revision)][0]

    def history(self, revision: str) -> list[str]:
        """Commits from `revision` back to the first."""
        found, sha = [], self.branches.get(revision)
        while sha is not None:
            found.append(sha)
            sha = self.commits[sha][1]
        return found


class Refusal(Exception):  # noqa: N818  (an answer, not an error of the server)
    """An HTTP status other than 200."""

    def __init__(self, status: int, message: str, code: str = "", **body: object):
        self.status, self.headers = status, {"X-Error-Message": message}
        self.body = {"error": message, **body}
        if code:
            self.headers["X-Error-Code"] = code


def oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class LocalHub:
    """The server; `repos` may be looked at and changed by the test at any time."""

    page_size = 25  # entries of a listing in one answer

    def __init__(self, repos: dict[str, Repo] | None = None, trusted: tuple[str, ...] = ()):
        self.repos = copy.deepcopy(repos) if repos else {}
        self.trusted, self.faults, self.requests = trusted, [], []
        self.answers: dict[str, tuple] = {}  # the last one to each request
        self.lock = threading.RLock()
        methods = {
            f"do_{name}": _Handler.handle_request for name in ("GET", "HEAD", "POST", "DELETE")
        }
        handler = type("Handler", (_Handler,), {"hub": self, **methods})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> LocalHub:
        serve = {"target": self.server.serve_forever, "kwargs": {"poll_interval": 0.01}}
        threading.Thread(daemon=True, **serve).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, *faults: Fault) -> None:
        self.faults += faults

    def add_repo(self, name: str) -> None:
        """As the Hub makes one: a first commit on main."""
        self.repos[name] = Repo()
        self.repos[name].commit("main", {".gitattributes": b"*.bin filter=lfs\n"})

    def add_branch(self, name: str, branch: str) -> None:
        self.repos[name].branches[branch] = self.repos[name].branches["main"]

    def writes(self) -> list[str]:
        """Every request so far that could change something."""
        harmless = re.compile(r"GET|HEAD|POST .*/(validate-yaml|(preupload|paths-info)/.*)")
        return [request for request in self.requests if not harmless.match(request)]

    def repo(self, name: str) -> Repo:
        if name not in self.repos:
            raise Refusal(404, "Repository not found", "RepoNotFound")
        return self.repos[name]


class _Handler(BaseHTTPRequestHandler):
    """Reads a request, applies a fault if one is due, and routes the rest to a method."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are two writes: 40 ms each otherwise

    def log_message(self, *_: object) -> None:
        pass

    def handle_request(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.content = self.rfile.read(length)
        url = urlsplit(self.path)
        self.query, path = parse_qs(url.query), unquote(url.path)
        request = f"{self.command} {path}"
        with self.hub.lock:
            self.hub.requests.append(request)
            fault = next((f for f in self.hub.faults if f.applies(request)), None)
        what = fault.what if fault else ""
        if what == "drop before":
            return self._drop()
        if what == "hang before":
            return self._hang(fault)
        if what == "race":
            fault.action(self.hub)
        try:
            if what == "refuse":
                raise Refusal(fault.status, fault.message)
            with self.hub.lock:
                headers, body = self._route(f"{self.command} {url.path}")
            status = 200
            if what == "replay":
                headers, body = self.hub.answers[request]
            self.hub.answers[request] = headers, body
            if what == "garble":
                status, headers, body = fault.status, {}, b"<html>please log in</html>"
            if what == "lose":
                raise Refusal(fault.status, fault.message)
        except Refusal as refusal:
            status, headers = refusal.status, refusal.headers
            body = json.dumps(refusal.body).encode()
        if what == "drop after":
            return self._drop()
        if what == "hang after":
            return self._hang(fault)
        self.send_response(status)
        extra = fault.headers if fault else {}
        for name, value in {"Content-Length": len(body), **headers, **extra}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if what == "truncate" else body)
        if what == "truncate":
            self._drop()

    def _hang(self, fault: Fault) -> None:
        fault.is_hanging.set()
        time.sleep(HANG_SECONDS)
        self._drop()

    def _drop(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client may have gone first
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def _route(self, request: str) -> tuple[dict[str, object], bytes]:
        for pattern, method in ROUTES.items():
            match = re.fullmatch(pattern, request)
            if match:
                names = {key: value and unquote(value) for key, value in match.groupdict().items()}
                answer = getattr(self, method)(**names)
                return answer if isinstance(answer, tuple) else ({}, json.dumps(answer).encode())
        raise Refusal(404, f"this Hub has no {request}")

    def _rights(self) -> str:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in TOKENS:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return TOKENS[token]

    def _writable(self, repo: str, right: str = "write") -> Repo:
        if right not in self._rights():
            raise Refusal(403, "you may not write here")
        return self.hub.repo(repo)

    def whoami(self) -> object:
        self._rights()
        return {"name": "someone", "type": "user", "orgs": [{"name": "org"}]}

    def validate_yaml(self) -> object:
        return {"errors": [], "warnings": []}

    def organization(self, name: str) -> object:
        return {"name": name, "trustedKernelPublisher": name in self.hub.trusted}

    def create(self) -> object:
        body = json.loads(self.content)
        if body.get("type") != "kernel":
            raise Refusal(400, "only kernels here")
        if "create" not in self._rights():
            raise Refusal(403, "you don't have the rights to create a kernel under this namespace")
        name = f"{body['organization']}/{body['name']}"
        answer = {"url": f"{self.hub.url}/kernels/{name}", "name": name, "id": name}
        if name in self.hub.repos:
            raise Refusal(409, "You already created this kernel repo", **answer)
        self.hub.add_repo(name)
        return answer

    def info(self, repo: str, revision: str = "main") -> object:
        sha = self.hub.repo(repo).resolve(revision)
        return {"id": repo, "sha": sha, "private": False, "siblings": []}

    def refs(self, repo: str) -> object:
        def listed(kind: str, refs: dict[str, str]) -> list[dict[str, str]]:
            found = sorted(refs.items())
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": sha} for n, sha in found]

        found = self.hub.repo(repo)
        branches, tags = listed("heads", found.branches), listed("tags", found.tags)
        return {"branches": branches, "tags": tags, "converts": []}

    def create_branch(self, repo: str, branch: str) -> object:
        found = self._writable(repo)
        if branch in found.branches:
            raise Refusal(409, f"Reference already exists: refs/heads/{branch}")
        start = (json.loads(self.content or b"{}") or {}).get("startingPoint") or "main"
        found.branches[branch] = found.resolve(start)
        return {}

    def delete_branch(self, repo: str, branch: str) -> object:
        self._writable(repo).branches.pop(branch)
        return {}

    def tree(self, repo: str, revision: str, path: str | None = None) -> tuple:
        files = self.hub.repo(repo).files(revision)
        top = f"{path}/" if path else ""
        inside = {name: data for name, data in files.items() if name.startswith(top)}
        if path and not inside:
            raise Refusal(404, "no such folder", "EntryNotFound")
        entries = {}
        for name, data in inside.items():
            parts = name.removeprefix(top).split("/")
            for depth in range(1, len(parts)):
                folder = top + "/".join(parts[:depth])
                entries[folder] = {"type": "directory", "path": folder, "size": 0, "oid": "0" * 40}
            entries[name] = {"type": "file", "path": name, "size": len(data), "oid": oid(data)}
        if self.query.get("recursive", ["false"])[0].lower() not in ("true", "1"):
            entries = {n: e for n, e in entries.items() if "/" not in n.removeprefix(top)}
        found, start = sorted(entries.items()), int(self.query.get("cursor", ["0"])[0])
        end = start + self.hub.page_size
        link = f"{self.hub.url}{urlsplit(self.path).path}?recursive=true&cursor={end}"
        headers = {"Link": f'<{link}>; rel="next"'} if end < len(found) else {}
        return headers, json.dumps([entry for _, entry in found[start:end]]).encode()

    def paths_info(self, repo: str, revision: str) -> object:
        files = self.hub.repo(repo).files(revision)
        names = parse_qs(self.content.decode()).get("paths", [])
        return [
            {"type": "file", "path": name, "size": len(files[name]), "oid": oid(files[name])}
            for name in names
            if name in files
        ]

    def preupload(self, repo: str, revision: str) -> object:
        files = self._writable(repo).files(revision)
        answer = []
        for entry in json.loads(self.content)["files"]:
            known = {"oid": oid(files[entry["path"]])} if entry["path"] in files else {}
            answer.append(
                {"path": entry["path"], "uploadMode": "regular", "shouldIgnore": False, **known}
            )
        return {"files": answer}

    def commit(self, repo: str, branch: str) -> object:
        found = self._writable(repo)
        if branch not in found.branches:
            raise Refusal(404, "no such branch", "RevisionNotFound")
        lines = [json.loads(line) for line in self.content.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, found.branches[branch]):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(found.files(branch))
        for line in lines[1:]:
            path = line["value"]["path"]
            if line["key"] == "deletedFile":
                if path not in files:
                    raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
                del files[path]
            else:
                files[path] = base64.b64decode(line["value"]["content"])
        sha = found.commit(branch, files, header["summary"])
        return {"commitOid": sha, "commitUrl": f"{self.hub.url}/kernels/{repo}/commit/{sha}"}

    def resolve(self, repo: str, revision: str, path: str) -> tuple:
        found = self.hub.repo(repo)
        sha = found.resolve(revision)
        data = found.files(sha).get(path)
        if data is None:
            raise Refusal(404, "no such file", "EntryNotFound")
        return {"X-Repo-Commit": sha, "ETag": f'"{oid(data)}"', "Content-Length": len(data)}, data


ROUTES = {
    r"GET /api/whoami-v2": "whoami",
    r"POST /api/validate-yaml": "validate_yaml",
    r"GET /api/organizations/(?P<name>[^/]+)/overview": "organization",
    r"POST /api/repos/create": "create",
    rf"GET {REPO}": "info",
    rf"GET {REPO}/revision/(?P<revision>.+)": "info",
    rf"GET {REPO}/refs": "refs",
    rf"POST {REPO}/branch/(?P<branch>.+)": "create_branch",
    rf"DELETE {REPO}/branch/(?P<branch>.+)": "delete_branch",
    rf"GET {REPO}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?": "tree",
    rf"POST {REPO}/paths-info/(?P<revision>.+)": "paths_info",
    rf"POST {REPO}/preupload/(?P<revision>.+)": "preupload",
    rf"POST {REPO}/commit/(?P<branch>.+)": "commit",
    r"(?:GET|HEAD) /kernels/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)": (
        "resolve"
    ),
}
