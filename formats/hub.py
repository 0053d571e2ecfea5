"""Hub repositories: their lists of files, downloads of named files, and byte ranges of files.

`huggingface_hub` is imported inside functions, since local folders don't need it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from scute_compile.diagnostics import Code, ScuteError, fail
from scute_compile.formats.safetensors import TensorEntry, header_length, parse_header

_ID = re.compile(r"(?:[A-Za-z0-9_][\w.-]{0,95}/)?[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_PARALLEL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """One revision of a repository, or the part of it in the local cache."""

    id: str
    code: Code
    """The code of failures: no such adapter, or no such base."""
    files: tuple[str, ...]
    """Paths inside the repository."""
    revision: str | None = None
    """The commit that headers are read from; None for the local cache."""
    cached: Path | None = None
    """The snapshot in the local cache when the Hub could not be reached, else None."""

    def download(self, names: Sequence[str]) -> Path:
        """Download the named files and return their folder.

        Raises:
            ScuteError: `code` when the request fails.
        """
        if self.cached is not None:
            return self.cached
        from huggingface_hub import snapshot_download

        with _reported(self.id, self.code):
            # By branch and not by commit, so that the cache records the branch's commit.
            return Path(snapshot_download(self.id, allow_patterns=[*names]))

    def read_headers(self, names: Sequence[str]) -> Mapping[str, Mapping[str, TensorEntry]]:
        """Return the headers of safetensors files by name, fetching no byte beyond each header.

        Raises:
            ScuteError: SC104 or SC105 for damaged files, `code` when a request fails.
        """
        with ThreadPoolExecutor(_PARALLEL) as pool:
            return dict(zip(names, pool.map(self._read_header, names), strict=True))

    def _read_header(self, name: str) -> Mapping[str, TensorEntry]:
        where = f"{self.id}/{name}"
        with _reported(self.id, self.code):
            # Two small requests: `huggingface_hub`'s own reader fetches 100 kB in the first, weights included.
            start, size = self._range(name, 0, 8)
            length = header_length(start, size, where)
            raw, _ = self._range(name, 8, length) if length else (b"", size)
            return parse_header(raw, size, where)

    def _range(self, name: str, offset: int, length: int) -> tuple[bytes, int]:
        """Return `length` bytes from `offset` (fewer at the end of the file) and the size of the file."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined] # documented there, but not listed in __all__
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        headers = build_hf_headers() | {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        url = hf_hub_url(self.id, name, revision=self.revision)
        with get_session().stream("GET", url, headers=headers, timeout=30) as response:
            hf_raise_for_status(response)
            partial = response.status_code == 206
            total = (
                response.headers["Content-Range"].rpartition("/")[2] if partial else response.headers["Content-Length"]
            )
            skip = 0 if partial else offset
            raw = bytearray()
            # A server without ranges sends the whole file: stop after the wanted bytes.
            for chunk in response.iter_bytes(1 << 14):
                raw += chunk
                if len(raw) >= skip + length:
                    break
        return bytes(raw[skip : skip + length]), int(total)


def looks_like_id(source: str) -> bool:
    """Return whether a string could name a repository: `owner/name`, or a bare name.

    >>> [looks_like_id(s) for s in ("owner/name", "gpt2", "./folder", "/a/b", "a/b/c", "")]
    [True, True, False, False, False, False]
    """
    return bool(_ID.fullmatch(source)) and ".." not in source and "--" not in source


def portable_name(named: str | None) -> str | None:
    r"""Return a base's name without local folders: a Hub id as it is, the last component of a path.

    >>> [portable_name(named) for named in ("owner/name", "/data/llama-1b/", r"..\bases\llama-1b", "/", None)]
    ['owner/name', 'llama-1b', 'llama-1b', None, None]
    """
    if named is None or looks_like_id(named):
        return named
    parts = [part for part in re.split(r"[/\\]", named) if part not in ("", ".", "..")]
    return parts[-1] if parts else None


def find_repository(source: str, code: Code, wanted: Sequence[str]) -> Repository:
    """Look up a repository on the Hub or, when the request fails, in the local cache.

    Args:
        source: `owner/name`, or an older Hub id without an owner.
        code: The code of failures.
        wanted: Names or patterns of the files that the cache must hold, if the repository has them.

    Raises:
        ScuteError: `code`, with the endpoint that was tried.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with _reported(source, code):
            info = HfApi().model_info(source, timeout=30)
    except ScuteError:
        try:
            folder = Path(snapshot_download(source, local_files_only=True, allow_patterns=[*wanted]))
        except (LocalEntryNotFoundError, OSError, ValueError):
            folder = None
        if folder is None:
            raise  # the error of the request
        files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        return Repository(id=source, code=code, files=tuple(files), cached=folder)
    names = sorted(sibling.rfilename for sibling in info.siblings or ())
    return Repository(id=source, code=code, files=tuple(names), revision=info.sha)


@contextmanager
def _reported(source: str, code: Code) -> Iterator[None]:
    try:
        yield
    except ScuteError:
        raise
    except Exception as error:  # noqa: BLE001 - the client raises its HTTP library's errors, and that library changes
        _refused(source, code, error)


def _refused(source: str, code: Code, error: Exception) -> NoReturn:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        reason, way_out = "access to it is gated", "accept its terms on its page, then log in with `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError):
        reason = "there is no such repository, or it is private"
        way_out = "check the spelling; for a private repository, log in with `hf auth login`"
    elif isinstance(error, OfflineModeIsEnabled):
        reason = "offline mode is on and the local cache does not hold it"
        way_out = "unset HF_HUB_OFFLINE, or pass a local folder"
    else:
        lines = str(error).splitlines()
        reason = f"the request failed ({type(error).__name__}{': ' + lines[0] if lines else ''})"
        way_out = "check the network, or pass a local folder"
    fail(
        code,
        where=source,
        found=f"no folder of that name; tried the repository {source} at {constants.ENDPOINT}: {reason}",
        expected="a folder, or a repository that can be reached",
        next=way_out,
    )
