"""Where ranks that have no MPI meet, and the secret by which they know each other.

``GRAPHC_JOB_SECRET`` is the same in the environment of every worker; ``graphc launch`` makes one for each run. Without it,
workers of one machine that meet on the loopback use a key of their user, which lies in the cache folder. Beyond the loopback
nobody listens without a secret.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from graphc.cache_folder import cache_folder
from graphc.errors import UsageError

JOB_SECRET = "GRAPHC_JOB_SECRET"
"""Environment variable: what every worker of a run proves to the others that it knows."""

LISTEN_ADDRESS = "GRAPHC_LISTEN_ADDR"
"""Environment variable: the address that rank 0 listens at, where it is not MASTER_ADDR (behind a forwarded port, say)."""

LOOPBACK = "127.0.0.1"
SHORTEST = 16  # characters of a secret
KEY_FILE = "job-key"

Place = tuple[str, int]


def new_secret() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)


def meeting_place(environment: Mapping[str, str] | None = None) -> Place:
    """Host and port of rank 0, from ``MASTER_ADDR`` and ``MASTER_PORT``.

    torchrun keeps a server of its own at that port; ours is at the next one then, and on the loopback if all workers are on
    this machine, whose name torchrun gives.

    Raises:
        UsageError: one of them is missing or no port.
    """
    found = os.environ if environment is None else environment
    try:
        host, text = found["MASTER_ADDR"], found["MASTER_PORT"]
    except KeyError as error:
        raise UsageError(f"the environment does not set {error.args[0]}: where rank 0 listens for the others") from None
    if not host.strip():
        raise UsageError("MASTER_ADDR is empty: it says where rank 0 listens for the others")
    if not text.isdecimal() or not 0 < int(text) < 65535:
        raise UsageError(f"MASTER_PORT={text!r} is no port that rank 0 can listen at")
    torchrun = "TORCHELASTIC_RUN_ID" in found and found.get("LOCAL_WORLD_SIZE", "") == found.get("WORLD_SIZE")
    return LOOPBACK if torchrun else host, int(text) + (found.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true")


def listening_place(place: Place, environment: Mapping[str, str] | None = None) -> Place:
    """Where rank 0 listens so that the others reach it at ``place``."""
    found = os.environ if environment is None else environment
    return found.get(LISTEN_ADDRESS) or place[0], place[1]


def job_secret(*hosts: str, environment: Mapping[str, str] | None = None) -> bytes:
    """The secret of a run whose workers meet at ``hosts``.

    Raises:
        UsageError: there is none and a host is not on the loopback, or it is too short.
    """
    found = (os.environ if environment is None else environment).get(JOB_SECRET, "")
    if found and len(found) < SHORTEST:
        raise UsageError(f"{JOB_SECRET} is too short to be secret: at least {SHORTEST} characters, better {_LINE}")
    if found:
        return os.fsencode(found)
    beyond = next((host for host in hosts if not is_loopback(host)), None)
    if beyond is not None:
        raise UsageError(
            f"workers that meet at {beyond} must prove that they belong together, and {JOB_SECRET} is not set; "
            f"set it to the same value for all of them: {_LINE} once, and hand it to every machine"
        )
    return _user_key()


_LINE = f"export {JOB_SECRET}=$(python -c 'import secrets; print(secrets.token_hex(32))')"


def is_loopback(host: str) -> bool:
    """Whether all addresses of ``host`` are those of this machine alone."""
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(text.partition("%")[0]).is_loopback for text in found)


def _user_key() -> bytes:
    """The key of this user on this machine, made where there is none."""
    path = cache_folder() / KEY_FILE
    if not path.exists():
        draft = path.with_name(f"{KEY_FILE}-{os.getpid()}-{secrets.token_hex(4)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(new_secret())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # whole or not at all, and never over another worker's
        draft.unlink()
    return Path(path).read_bytes()
