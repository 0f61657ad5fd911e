"""The secret that the ranks of a run share. All else that is secret goes through torch's store encrypted under it, since
whoever can listen to the store or connect to it can read the store."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets

from paramhub import _native
from paramhub.errors import ConnectError, MisuseError

_SECRET_BYTES = 32
_SEALED = "sealed:"
_SOURCES = ("job", "token")
"""What all ranks may know before they meet: the secret of the job of `paramhub run`, or the admin token."""


def own_sources() -> list[str]:
    """Those of `_SOURCES` that this process has."""
    known = {"job": bool(os.environ.get("PARAMHUB_SECRET")), "token": admin_token() is not None}
    return [source for source in _SOURCES if known[source]]


def admin_token() -> str | None:
    """The admin token in ``PARAMHUB_ADMIN_TOKEN`` or in the file that ``PARAMHUB_ADMIN_TOKEN_FILE`` names."""
    try:
        return _native.admin_token()
    except ValueError as error:
        raise MisuseError(str(error)) from None


class RunSecret:
    """The secret, as one rank knows it."""

    def __init__(self, rank: int, secret: bytes) -> None:
        self._rank = rank
        self._secret = secret
        self._memory: int | None = None
        self.is_exposed = False
        """True if the secret itself went through the store."""

    @classmethod
    def choose(cls, common_sources: list[str], *, is_on_one_host: bool) -> tuple[RunSecret, str]:
        """Rank 0's secret, and the text that tells the other ranks where they find it. ``common_sources`` are those that every
        rank has. On one host the secret is in memory that only processes of this user can open."""
        choice: dict[str, str] = {"from": "store"}
        if common_sources:
            choice = {"from": common_sources[0], "salt": secrets.token_hex(16)}
            return cls(0, _from_source(choice)), json.dumps(choice)
        chosen = cls(0, secrets.token_bytes(_SECRET_BYTES))
        if is_on_one_host:
            chosen._memory = os.memfd_create("paramhub-run-secret")
            os.write(chosen._memory, chosen._secret)
            choice = {"from": "memory", "path": f"/proc/{os.getpid()}/fd/{chosen._memory}"}
        else:
            chosen.is_exposed = True
            choice["secret"] = chosen._secret.hex()
        return chosen, json.dumps(choice)

    @classmethod
    def find(cls, rank: int, choice_text: str) -> RunSecret:
        """The secret of another rank than 0, which finds it as rank 0 has told."""
        choice = json.loads(choice_text)
        source = choice["from"]
        if source == "store":
            return cls(rank, bytes.fromhex(choice["secret"]))
        if source == "memory":
            return cls(rank, _read_memory(rank, choice["path"]))
        if source not in own_sources():
            raise ConnectError(f"rank {rank}: rank 0 knows the {source}'s secret, and this rank does not")
        return cls(rank, _from_source(choice))

    def seal(self, key: str, text: str) -> str:
        """``text`` as the store may show it under ``key``."""
        return _SEALED + base64.b64encode(_native.seal(self._secret, key, text)).decode()

    def open(self, key: str, sealed: str) -> str:
        """The text that another rank has sealed for ``key``."""
        text = None
        if sealed.startswith(_SEALED):
            with_tag = base64.b64decode(sealed.removeprefix(_SEALED), validate=True)
            text = _native.open_sealed(self._secret, key, with_tag)
        if text is None:
            raise ConnectError(
                f"rank {self._rank}: what stands in torch's store under {key} was not written by a rank of this run: do all "
                "ranks have the same PARAMHUB_ADMIN_TOKEN or PARAMHUB_SECRET?"
            )
        return text

    def derive(self, label: str) -> str:
        """A secret for one use, in hexadecimal digits."""
        return _native.derive_secret(self._secret, label).hex()

    def close(self) -> None:
        """Frees the memory in which other ranks find the secret."""
        memory, self._memory = self._memory, None
        if memory is not None:
            os.close(memory)


def _from_source(choice: dict[str, str]) -> bytes:
    salt = bytes.fromhex(choice["salt"])
    if choice["from"] == "job":
        # What may follow is the fingerprint of the manager's authority, which is no secret.
        nonce = os.environ["PARAMHUB_SECRET"].strip().partition(".")[0]
        return _native.derive_secret(bytes.fromhex(nonce), f"torch run {salt.hex()}")
    token = admin_token()
    assert token is not None
    # People choose tokens. The slow hash makes guesses expensive for those who can read the store.
    return hashlib.scrypt(token.encode(), salt=salt, n=2**14, r=8, p=1, dklen=_SECRET_BYTES)


def _read_memory(rank: int, path: str) -> bytes:
    if not re.fullmatch(r"/proc/\d+/fd/\d+", path):
        raise ConnectError(f"rank {rank}: {path!r} in torch's store is no memory of rank 0")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            owner, secret = os.fstat(descriptor).st_uid, os.pread(descriptor, _SECRET_BYTES + 1, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConnectError(
            f"rank {rank} cannot read the run's secret in the memory of rank 0, {path}: {error.strerror}. Ranks of one host "
            "must be of one user, and see one another in /proc; if they do not, name their hosts with PARAMHUB_HOST and give "
            "all of them PARAMHUB_ADMIN_TOKEN_FILE"
        ) from None
    if owner != os.geteuid() or len(secret) != _SECRET_BYTES:
        raise ConnectError(f"rank {rank}: {path} is not the memory in which rank 0 keeps the run's secret")
    return secret
