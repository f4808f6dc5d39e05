"""Lists what a package index or a find-links entry offers, over HTTP or from disk."""

from __future__ import annotations

import netrc
import os
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

import httpx
from unearth import Link, PackageFinder

from overlay.errors import MachineError
from overlay.sources import download
from overlay.sources.download import Trouble
from overlay.sources.pipconfig import redacted

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from overlay.sources.pipconfig import PipConfig, Place

_PAGE_RETRIES = 2  # fewer than for files: an index that is out of reach shouldn't cost minutes


def default_index() -> str:
    """The index that is asked where pip's configuration names none."""
    return str(PackageFinder().sources[0]["url"])


class Web:
    """All connections of one search. Without ``client``, so offline, it reads disks only."""

    def __init__(self, config: PipConfig, places: Sequence[Place], *, offline: bool) -> None:
        self._trusted = config.trusted_hosts
        self.retries = config.retries
        self.client = None if offline else _client(config, places)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.client is not None:
            self.client.close()

    def links(self, place: Place, project: str, file: str | None = None) -> list[Link]:
        """Where the place says that the file lies; without one, all files of the project.

        Raises:
            Trouble: it couldn't be asked.
        """
        if place.path is not None and not place.path.exists():
            raise Trouble("there is no such file or folder")
        session = _Session(self.client, self._trusted)
        url = place.path.absolute().as_uri() if place.path is not None else place.url
        try:
            finder = PackageFinder(
                cast("Any", session),  # unearth's protocol, which httpx's own answers fulfil
                index_urls=[url] if place.kind == "index" else (),
                find_links=[url] if place.kind == "find-links" else (),
                trusted_hosts=self._trusted,
                ignore_compatibility=True,  # wheels for any machine
            )
            found = finder.find_all_packages(project, allow_yanked=True)
            links = [p.link for p in found if file in (None, p.link.filename)]
        except httpx.InvalidURL as fault:  # its text may quote a password
            raise Trouble("its address is malformed") from fault
        except (httpx.HTTPError, OSError) as fault:
            raise Trouble(f"{type(fault).__name__}: {fault}".rstrip(": ")) from fault
        except ValueError as fault:  # neither HTML nor JSON, whatever its type said
            raise Trouble(f"its page can't be read: {type(fault).__name__}") from fault
        if not links and session.faults:
            raise Trouble("; ".join(session.faults))
        if not links and not place.is_local and not session.asked:
            raise Trouble("not asked: it is plain HTTP, and its host isn't in pip's trusted-host")
        return links


class _Session:
    """What unearth gets its pages from (its protocol ``Fetcher``)."""

    def __init__(self, client: httpx.Client | None, trusted: Iterable[str]) -> None:
        self._client, self._trusted = client, tuple(trusted)
        self.asked = 0
        self.faults: list[str] = []

    def get(self, url: str, *, headers: Mapping[str, str] | None = None) -> httpx.Response:
        self.asked += 1
        answer = (
            self._from_disk(url) if url.startswith("file:") else self._asked("GET", url, headers)
        )
        if answer.status_code >= 400:
            self.faults.append(f"HTTP {answer.status_code} for its page of the project")
        return answer

    def head(self, url: str, *, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self._asked("HEAD", url, headers)

    def get_stream(
        self, url: str, *, headers: Mapping[str, str] | None = None
    ) -> AbstractContextManager[httpx.Response]:
        raise NotImplementedError("unearth is only asked for lists")

    def iter_secure_origins(self) -> Iterator[tuple[str, str, str]]:
        from unearth.fetchers import DEFAULT_SECURE_ORIGINS

        yield from DEFAULT_SECURE_ORIGINS
        for host in self._trusted:
            parts = urlsplit(f"//{host}")
            yield ("*", parts.hostname or "", str(parts.port or "*"))

    def _from_disk(self, url: str) -> httpx.Response:
        request = httpx.Request("GET", url)
        try:
            content = Link(url).file_path.read_bytes()
        except OSError:
            return httpx.Response(404, request=request)
        return httpx.Response(
            200, content=content, headers={"Content-Type": "text/html"}, request=request
        )

    def _asked(self, method: str, url: str, headers: Mapping[str, str] | None) -> httpx.Response:
        if self._client is None:
            raise Trouble(f"{redacted(url)} isn't asked, since offline holds")
        failed = 0
        while True:
            try:
                answer = self._client.request(method, url, headers=headers)
                if answer.status_code not in download.LATER or failed >= _PAGE_RETRIES:
                    return answer
            except httpx.TransportError as fault:
                if failed >= _PAGE_RETRIES or isinstance(fault, httpx.TimeoutException):
                    raise
            failed += 1
            time.sleep(download.BACKOFF * 2**failed)


class _Credentials(httpx.Auth):
    """From the address itself, from a configured address of the same origin, or from netrc."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._known: dict[tuple[str, str, int | None], tuple[str, str]] = {}
        for text in urls:
            # A malformed one is told of when it is asked.
            with suppress(httpx.InvalidURL, ValueError):
                url = httpx.URL(text)
                if url.username:
                    self._known.setdefault(_origin(url), (url.username, url.password))

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        url = request.url
        own = (url.username, url.password) if url.username else None
        found = own or self._known.get(_origin(url)) or _from_netrc(url.host)
        if found:
            yield from httpx.BasicAuth(*found).auth_flow(request)
        else:
            yield request


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port  # httpx has None for a scheme's own port


def _from_netrc(host: str) -> tuple[str, str] | None:
    try:
        entry = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    return (entry[0], entry[2]) if entry else None


def _client(config: PipConfig, places: Sequence[Place]) -> httpx.Client:
    try:
        proxy = config.proxy
        if proxy and "://" not in proxy:
            proxy = f"http://{proxy}"  # pip takes a bare host:port
        trusting = ssl.create_default_context()
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
        if config.client_cert:
            trusting.load_cert_chain(config.client_cert)
        insecure = httpx.HTTPTransport(verify=trusting, proxy=proxy)
        return httpx.Client(
            verify=_tls(config),
            proxy=proxy,
            mounts={f"all://{host}": insecure for host in config.trusted_hosts},
            auth=_Credentials(place.url for place in places),
            timeout=config.timeout or None,
            follow_redirects=True,
        )
    except (OSError, ValueError, ImportError, httpx.InvalidURL) as fault:
        raise MachineError(
            "pip's settings for certificates or proxies can't be used",
            why=f"{type(fault).__name__}: {fault}",
            fix="check cert, client-cert, proxy and trusted-host in `python -m pip config list`, "
            "and the variables for proxies",
        ) from fault


def _tls(config: PipConfig) -> ssl.SSLContext:
    """Trust what pip trusts: the bundle it is given, else the system's and certifi's."""
    given = config.cert or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if given:
        is_folder = Path(given).is_dir()
        context = ssl.create_default_context(
            cafile=None if is_folder else given, capath=given if is_folder else None
        )
    else:
        context = httpx.create_ssl_context()
        context.load_default_certs()
    if config.client_cert:
        context.load_cert_chain(config.client_cert)
    return context
