"""A Hugging Face Hub on loopback, for tests with the real `huggingface_hub` client: model repos, LFS, pull requests,
tokens.

A Repo holds refs (full names to commit ids), commits, and LFS objects by sha256; a commit holds its files. Uploads and
downloads of LFS objects go to a storage under another host name and without a token, as on the Hub. Xet is never
offered.
"""

import base64
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

DATE = "2026-01-01T00:00:00.000Z"
LFS_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.onnx", "*.parquet", "*.npz", "*.zip", "*.model")
LFS_BYTES = 10 * 1024 * 1024  # from here on files are LFS under any name
CHUNK_BYTES = 1024  # of downloads, which resume at whole ones: small, so that small files break off as large ones do
FIRST_FILES = {".gitattributes": "".join(f"{p} filter=lfs diff=lfs merge=lfs -text\n" for p in LFS_PATTERNS).encode()}
PLACEHOLDERS = {"repo": "[^/]+/[^/]+?", "revision": "[^/]+", "name": "[^/]+", "oid": "[0-9a-f]{64}", "path": ".+"}

# needs: "nothing"; "login"; "read" and "write" a repo; "propose": write, or open or extend a pull request; "content" of
# a gated repo
ROUTES = (
    ("POST", "/api/validate-yaml", "validate_card", "nothing"),
    ("POST", "/api/repos/create", "create_repo", "login"),
    ("GET", "/api/models/{repo}", "info", "read"),
    ("GET", "/api/models/{repo}/revision/{revision}", "info", "read"),
    ("GET", "/api/models/{repo}/tree/{revision}", "tree", "read"),
    ("GET", "/api/models/{repo}/tree/{revision}/{path}", "tree", "read"),
    ("POST", "/api/models/{repo}/branch/{name}", "create_branch", "write"),
    ("POST", "/api/models/{repo}/preupload/{revision}", "preupload", "propose"),
    ("POST", "/api/models/{repo}/commit/{revision}", "commit", "propose"),
    ("POST", "/{repo}.git/info/lfs/objects/batch", "lfs_batch", "login"),
    ("POST", "/{repo}.git/info/lfs/objects/verify", "lfs_verify", "login"),
    ("PUT", "/storage/{repo}/{oid}", "store", "nothing"),
    ("GET", "/storage/{repo}/{oid}", "serve", "nothing"),
    ("GET", "/{repo}/resolve/{revision}/{path}", "resolve", "content"),
)


@dataclass(frozen=True)
class Blob:
    """A file of a commit."""

    data: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return sha256(self.data).hexdigest()

    @cached_property
    def in_git(self) -> bytes:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n"
        return pointer.encode() if self.lfs else self.data

    @cached_property
    def git_oid(self) -> str:
        return sha1(b"blob %d\0" % len(self.in_git) + self.in_git).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_oid

    def entry(self, path: str) -> dict:
        """Returns the file's entry for listings of a tree, and, by `blobId` and `sha256`, of a repo."""
        lfs = {"oid": self.sha256, "sha256": self.sha256, "size": len(self.data), "pointerSize": len(self.in_git)}
        known = {"type": "file", "path": path, "size": len(self.data), "oid": self.git_oid, "blobId": self.git_oid}
        return known | ({"lfs": lfs} if self.lfs else {})


class Commit(NamedTuple):
    id: str
    files: dict[str, Blob]
    title: str


class User(NamedTuple):
    name: str
    namespaces: frozenset[str]


ANYONE = User("", frozenset())


class Reply(NamedTuple):
    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = {}


class HubError(Exception):
    """An answer with the Hub's error headers; the client chooses its exception by the code."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        error = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply = Reply(json.dumps({"error": message}).encode(), status, error | dict(headers or {}))


class BrokenOff(Exception):  # noqa: N818 - not an error of the server: a fault that a test asked for
    """An exception that ends the connection here."""


@dataclass
class Request:
    """A line of the log. `path` is unquoted and without its query; `received` and `sent` count bytes of the bodies."""

    method: str
    path: str
    user: str = ""
    received: int = 0
    sent: int = 0
    status: int | None = None


@dataclass
class Repo:
    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)

    def is_own(self, user: User) -> bool:
        return self.id.split("/")[0] in user.namespaces

    def find(self, revision: str) -> Commit:
        """Returns the commit of a branch, a full ref name or a full commit id."""
        for name in (f"refs/heads/{revision}", revision):
            if name in self.refs:
                return self.commits[self.refs[name]]
        if revision in self.commits:
            return self.commits[revision]
        raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def commit(self, ref: str, files: dict[str, Blob], title: str) -> Commit:
        about = json.dumps([self.id, len(self.commits), title, {path: blob.git_oid for path, blob in files.items()}])
        commit = Commit(sha1(about.encode()).hexdigest(), files, title)
        self.commits[commit.id] = commit
        self.refs[ref] = commit.id
        return commit

    def blob(self, path: str, data: bytes) -> Blob:
        blob = Blob(data, is_lfs(path, len(data), data[:512]))
        if blob.lfs:
            self.objects[blob.sha256] = data
        return blob


def is_lfs(path: str, size: int, sample: bytes) -> bool:
    return (
        size >= LFS_BYTES
        or b"\0" in sample
        or any(fnmatch(PurePosixPath(path).name, pattern) for pattern in LFS_PATTERNS)
    )


def ref_of(revision: str) -> str:
    return revision if revision.startswith("refs/") else f"refs/heads/{revision}"


def route(method: str, path: str) -> tuple[str, str, dict[str, str]]:
    """Returns the action for a request, the right it needs, and the placeholders in the path. HEAD is routed as GET."""
    for allowed, pattern, action, needs in ROUTES:
        match = re.fullmatch(re.sub(r"\{(\w+)\}", lambda m: f"(?P<{m[1]}>{PLACEHOLDERS[m[1]]})", pattern), path)
        if match and allowed == method.replace("HEAD", "GET"):
            return action, needs, {name: unquote(value) for name, value in match.groupdict().items()}
    raise HubError(404, "", f"this Hub has no {method} {path}")


class Handler(BaseHTTPRequestHandler):
    """A connection. Each action of ROUTES is a method that returns a Reply, or an object to send as JSON."""

    protocol_version = "HTTP/1.1"
    # headers and body are two writes: else each answer waits for a delayed acknowledgement
    disable_nagle_algorithm = True
    server: "HubServer"

    def dispatch(self) -> None:
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query))
        self.logged = Request(self.command, unquote(url.path))
        self.server.log.append(self.logged)
        try:
            self.body = self.receive()
            self.send(self.answer(url.path))
        except BrokenOff:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = dispatch  # noqa: N815 - the names http.server asks for

    def log_message(self, *args: Any) -> None:
        """Prints nothing: the log is `HubServer.log`."""

    def receive(self) -> bytes:
        size = int(self.headers.get("Content-Length", 0))
        limit = self.server.fault(self.command, size)
        body = self.rfile.read(size if limit is None else limit)
        self.logged.received = len(body)
        if limit is not None:
            raise BrokenOff
        return body

    def answer(self, path: str) -> Reply:
        try:
            with self.server.lock:
                action, needs, found = route(self.command, path)
                self.user = self.login()
                if needs == "login" and self.user is ANYONE:
                    raise HubError(401, "", "Invalid username or password.")
                if "repo" in found:
                    self.repo = self.open_repo(found.pop("repo"), needs, found.get("revision", ""))
                reply = getattr(self, action)(**found)
        except HubError as error:
            return error.reply
        return (
            reply
            if isinstance(reply, Reply)
            else Reply(json.dumps(reply).encode(), headers={"Content-Type": "application/json"})
        )

    def send(self, reply: Reply) -> None:
        self.logged.status = reply.status
        self.send_response(reply.status)
        for name, value in ({"Content-Length": str(len(reply.body))} | dict(reply.headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        stored = self.logged.path.startswith("/storage/")
        limit = self.server.fault(self.command, len(reply.body)) if stored else None
        body = reply.body[:limit]
        self.logged.sent = len(body)  # before it is written: the client may ask for the log at once
        self.wfile.write(body)
        if limit is not None:
            raise BrokenOff

    def json(self) -> dict:
        return json.loads(self.body)

    def login(self) -> User:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme and token not in self.server.users:
            raise HubError(401, "", "Invalid credentials in Authorization header")
        user = self.server.users.get(token, ANYONE)
        self.logged.user = user.name
        return user

    def open_repo(self, repo_id: str, needs: str, revision: str) -> Repo:
        repo = self.server.repos.get(repo_id)
        if repo is not None and needs == "nothing":
            return repo
        if repo is None or (repo.private and not repo.is_own(self.user)):
            self.refuse(404, "RepoNotFound", "Repository not found")
        if needs == "content" and repo.gated and not repo.is_own(self.user):
            self.refuse(403, "GatedRepo", f"Access to model {repo_id} is restricted.")
        if needs in ("write", "propose"):
            proposes = needs == "propose" and ("create_pr" in self.query or revision.startswith("refs/pr/"))
            if self.user is ANYONE or not (proposes or repo.is_own(self.user)):
                self.refuse(403, "", f"You don't have the rights to write to {repo_id}")
        return repo

    def refuse(self, status: int, code: str, message: str) -> NoReturn:
        """Refuses a request; an anonymous user is asked to log in, whatever the reason."""
        if self.user is not ANYONE:
            raise HubError(status, code, message)
        # The client takes a 401 without a code for a missing repo on https URLs only: the code makes it do so on http.
        raise HubError(401, code or "RepoNotFound", "Invalid username or password.")

    def validate_card(self) -> dict:
        return {"errors": [], "warnings": []}

    def create_repo(self) -> Reply | dict:
        wanted = self.json()
        namespace = wanted.get("organization") or self.user.name
        repo_id = f"{namespace}/{wanted['name']}"
        url = {"url": f"{self.server.url}/{repo_id}", "name": repo_id}
        if namespace not in self.user.namespaces:
            self.refuse(403, "", f"You don't have the rights to create a model under {namespace}")
        if repo_id in self.server.repos:
            return Reply(json.dumps(url | {"error": "You already created this model repo"}).encode(), 409)
        self.server.create(repo_id, private=wanted.get("visibility") == "private")
        return url

    def info(self, revision: str = "main") -> dict:
        commit = self.repo.find(revision)
        siblings = [
            {"rfilename": path} | (blob.entry(path) if "blobs" in self.query else {})
            for path, blob in commit.files.items()
        ]
        names = {"id": self.repo.id, "modelId": self.repo.id, "author": self.repo.id.split("/")[0], "sha": commit.id}
        flags = {"private": self.repo.private, "gated": "manual" if self.repo.gated else False, "disabled": False}
        return (
            names
            | flags
            | {"siblings": siblings, "tags": [], "downloads": 0, "likes": 0, "createdAt": DATE, "lastModified": DATE}
        )

    def tree(self, revision: str, path: str = "") -> list[dict]:
        prefix = f"{path}/" if path else ""
        files = {p: blob for p, blob in self.repo.find(revision).files.items() if p.startswith(prefix)}
        if path and not files:
            raise HubError(404, "EntryNotFound", f"{path} does not exist on {revision}")
        folders = {str(parent) for p in files for parent in PurePosixPath(p).parents if str(parent).startswith(prefix)}
        entries = [
            {"type": "directory", "path": p, "oid": sha1(p.encode()).hexdigest(), "size": 0}
            for p in sorted(folders - {"."})
        ]
        entries += [blob.entry(p) for p, blob in files.items()]
        return [e for e in entries if self.query.get("recursive") == "true" or "/" not in e["path"][len(prefix) :]]

    def create_branch(self, name: str) -> dict:
        ref = f"refs/heads/{name}"
        if ref in self.repo.refs:
            raise HubError(409, "", f"Reference already exists: {ref}")
        self.repo.refs[ref] = self.repo.find(self.json().get("startingPoint") or "main").id
        return {}

    def preupload(self, revision: str) -> dict:
        there = self.repo.find(revision).files
        return {"files": [self.upload_mode(file, there.get(file["path"])) for file in self.json()["files"]]}

    def upload_mode(self, file: dict, there: Blob | None) -> dict:
        lfs = is_lfs(file["path"], file["size"], base64.b64decode(file["sample"]))
        mode = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
        return mode | ({"oid": there.etag} if there else {})  # by the oid the client knows what has not changed

    def commit(self, revision: str) -> dict:
        header, *operations = (json.loads(line) for line in self.body.splitlines())
        base, is_pull = self.repo.find(revision), "create_pr" in self.query
        number = 1 + sum(name.startswith("refs/pr/") for name in self.repo.refs)
        ref = f"refs/pr/{number}" if is_pull else ref_of(revision)
        if not is_pull and ref not in self.repo.refs:
            raise HubError(400, "", f"{revision} is no branch: commits go to branches and pull requests")
        files = dict(base.files)
        for operation in operations:
            OPERATIONS[operation["key"]](self, files, **operation["value"])
        commit = self.repo.commit(ref, files, header["value"]["summary"])
        home = f"{self.server.url}/{self.repo.id}"
        pull_url = f"{home}/discussions/{number}" if is_pull else None
        return {
            "success": True,
            "commitOid": commit.id,
            "commitUrl": f"{home}/commit/{commit.id}",
            "pullRequestUrl": pull_url,
        }

    def put_file(self, files: dict[str, Blob], path: str, content: str, encoding: str) -> None:
        files[path] = Blob(base64.b64decode(content), lfs=False)

    def put_object(self, files: dict[str, Blob], path: str, algo: str, oid: str, size: int | None = None) -> None:
        if oid not in self.repo.objects:
            raise HubError(400, "", f"LFS pointer of {path} pointed to a file that does not exist: {oid}")
        files[path] = Blob(self.repo.objects[oid], lfs=True)

    def delete_file(self, files: dict[str, Blob], path: str) -> None:
        if files.pop(path, None) is None:
            raise HubError(404, "EntryNotFound", f"A file with this name doesn't exist: {path}")

    def lfs_batch(self) -> dict:
        return {
            "transfer": "basic",
            "objects": [self.lfs_object(wanted["oid"], wanted["size"]) for wanted in self.json()["objects"]],
        }

    def lfs_object(self, oid: str, size: int) -> dict:
        known = {"oid": oid, "size": size, "authenticated": True}
        if oid in self.repo.objects:
            return known
        upload = {"href": f"{self.server.storage_url}/{self.repo.id}/{oid}"}
        verify = {"href": f"{self.server.url}/{self.repo.id}.git/info/lfs/objects/verify"}
        return known | {"actions": {"upload": upload, "verify": verify}}

    def lfs_verify(self) -> dict:
        wanted = self.json()
        if len(self.repo.objects.get(wanted["oid"], b"")) != wanted["size"]:
            raise HubError(404, "", f"LFS object {wanted['oid']} of {wanted['size']} bytes is not there")
        return {}

    def store(self, oid: str) -> Reply:
        if sha256(self.body).hexdigest() != oid:
            raise HubError(400, "", f"{len(self.body)} bytes with another sha256 than {oid}")
        self.repo.objects[oid] = self.body
        return Reply()

    def serve(self, oid: str) -> Reply:
        return self.ranged(self.repo.objects[oid], {"ETag": f'"{oid}"'})

    def resolve(self, revision: str, path: str) -> Reply:
        commit = self.repo.find(revision)
        headers = {"X-Repo-Commit": commit.id}
        blob = commit.files.get(path)
        if blob is None:
            raise HubError(404, "EntryNotFound", "Entry not found", headers)
        headers |= {"ETag": f'"{blob.etag}"'}
        if not blob.lfs:
            return self.ranged(blob.data, headers)
        linked = {"X-Linked-Size": str(len(blob.data)), "X-Linked-Etag": f'"{blob.etag}"'}
        location = {"Location": f"{self.server.storage_url}/{self.repo.id}/{blob.sha256}"}
        return Reply(status=302, headers=headers | linked | location)

    def ranged(self, data: bytes, headers: dict[str, str]) -> Reply:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return Reply(data, headers=headers | {"Accept-Ranges": "bytes"})
        start, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        if start > end:
            raise HubError(416, "", "Requested range not satisfiable", {"Content-Range": f"bytes */{len(data)}"})
        return Reply(data[start : end + 1], 206, headers | {"Content-Range": f"bytes {start}-{end}/{len(data)}"})


OPERATIONS: dict[str, Callable[..., None]] = {
    "file": Handler.put_file,
    "lfsFile": Handler.put_object,
    "deletedFile": Handler.delete_file,
}


class HubServer(ThreadingHTTPServer):
    """A Hub that serves while it is a context. `home` becomes the client's HF_HOME; `token` is that of its user
    "tester"."""

    def __init__(self, home: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.home = home
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.storage_url = f"http://localhost:{self.server_port}/storage"
        self.lock = threading.RLock()
        self.log: list[Request] = []
        self.repos: dict[str, Repo] = {}
        self.users: dict[str, User] = {}  # by token
        self.faults: dict[str, list[int]] = {"PUT": [], "GET": []}
        self.token = self.add_user("tester")

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def environment(self) -> dict[str, str]:
        """Returns the environment of a process that uses this Hub, without other settings of Hugging Face libraries."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_", "SSL_CERT_"))
        }
        hub = {"HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "HF_TOKEN": self.token}
        # Where hf_xet is installed the client uploads through Xet, without asking the Hub, unless Xet is disabled.
        disabled = [f"HF_HUB_DISABLE_{name}" for name in ("XET", "TELEMETRY", "PROGRESS_BARS", "UPDATE_CHECK")]
        # The conversion of *.bin weights is a thread that outlives the call it was started by.
        ones = dict.fromkeys([*disabled, "DISABLE_SAFETENSORS_CONVERSION"], "1")
        # This Hub needs no certificates. A client reads all of the system's, unless it is told of a folder of them.
        hub["SSL_CERT_DIR"] = str(self.home)
        return kept | hub | ones | dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")

    def add_user(self, name: str, *organizations: str) -> str:
        """Adds a user who owns the namespaces of that name and of the organizations, and returns the token."""
        token = f"hf_{name}_{len(self.users)}"
        self.users[token] = User(name, frozenset({name, *organizations}))
        return token

    def create(self, repo_id: str, private: bool = False, gated: bool = False) -> Repo:
        self.repos[repo_id] = repo = Repo(repo_id, private, gated)
        repo.commit(
            "refs/heads/main", {path: Blob(data, lfs=False) for path, data in FIRST_FILES.items()}, "initial commit"
        )
        return repo

    def add(
        self,
        repo_id: str,
        files: Mapping[str, bytes],
        revision: str = "main",
        private: bool = False,
        gated: bool = False,
    ) -> str:
        """Commits files and returns the commit's id. A new repo starts with FIRST_FILES, a new branch at main.

        `private` and `gated` count for a new repo.
        """
        with self.lock:
            repo = self.repos.get(repo_id) or self.create(repo_id, private, gated)
            base = repo.find(revision if ref_of(revision) in repo.refs else "main")
            added = {path: repo.blob(path, data) for path, data in files.items()}
            return repo.commit(ref_of(revision), base.files | added, f"Add {len(added)} files").id

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.data for path, blob in self.repos[repo_id].find(revision).files.items()}

    def requests(self, method: str, part_of_path: str = "") -> list[Request]:
        return [request for request in self.log if request.method == method and part_of_path in request.path]

    def break_upload(self, after: int, times: int = 1) -> None:
        """Makes the next PUT of an LFS object longer than `after` bytes read so far and close the connection."""
        self.faults["PUT"] += [after] * times

    def break_download(self, after: int, times: int = 1) -> None:
        """Makes the next GET that would send more than `after` bytes of an LFS object end there, and its connection."""
        self.faults["GET"] += [after] * times

    def fault(self, method: str, size: int) -> int | None:
        """Takes the next fault that a body of this size runs into."""
        with self.lock:
            waiting = self.faults.get(method, [])
            after = next((after for after in waiting if size > after), None)
            if after is not None:
                waiting.remove(after)
            return after
