"""What a stream reads: URL patterns, sources, and the manifest that its order is a function of."""

import fnmatch
import glob
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any, Self
from urllib.parse import urlsplit

from treadle.pipeline.storage import local_path, public_url, scheme_of
from treadle.shape import settle_numbers, shown

logger = logging.getLogger(__name__)

MAX_SHARDS = 1 << 24
"""Most shards that one pattern may name."""

MAX_URLS_IN_MANIFEST = 1000
"""A source of more shards is written down by their number and a digest: a state travels with every batch."""

MAX_CHECKED = 1000
"""Local shards of one list that are looked at before they are read."""

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?|([A-Za-z])\.\.([A-Za-z])")
_MAGIC = re.compile(r"[*?\[]")


def expand_braces(pattern: str) -> Iterator[str]:
    """The strings a pattern of `{a,b}` and `{000..127}` names, the last brace turning fastest. Other braces stay as they are."""
    depth = 0
    opened = -1
    for place, letter in enumerate(pattern):
        if letter == "{":
            opened = place if depth == 0 else opened
            depth += 1
        elif letter == "}" and depth:
            depth -= 1
            if depth:
                continue
            choices = _choices(pattern[opened + 1 : place])
            if choices is None:
                inner = "{" + pattern[opened + 1 : place] + "}"
                for rest in expand_braces(pattern[place + 1 :]):
                    yield pattern[:opened] + inner + rest
                return
            rests = pattern[place + 1 :]
            for choice in choices:
                for rest in expand_braces(rests):
                    yield pattern[:opened] + choice + rest
            return
    yield pattern


def _choices(body: str) -> Iterator[str] | None:
    """What the inside of a pair of braces stands for, None where it stands for itself."""
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(body):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append(body[begin:place])
            begin = place + 1
    if parts:
        parts.append(body[begin:])
        return (choice for part in parts for choice in expand_braces(part))
    match = _RANGE.fullmatch(body)
    if match is None:
        return None
    if match[4]:
        low, high = ord(match[4]), ord(match[5])
        step = 1 if low <= high else -1
        return (chr(code) for code in range(low, high + step, step))
    low, high = int(match[1]), int(match[2])
    by = max(1, abs(int(match[3]))) if match[3] else 1
    if abs(high - low) // by >= MAX_SHARDS:
        raise ValueError(f"{{{body}}} names more than {MAX_SHARDS} shards")
    digits = [text.lstrip("-") for text in (match[1], match[2])]
    padded = any(len(text) > 1 and text[0] == "0" for text in digits)
    width = max(len(match[1]), len(match[2])) if padded else 0
    numbers = range(low, high + 1, by) if low <= high else range(low, high - 1, -by)
    return (f"{number:0{width}d}" if width else str(number) for number in numbers)


class ListedUrls(tuple[str, ...]):
    """Shards that `expand_urls` has answered already, here or on another rank: they are taken as they are, without a look at storage."""

    __slots__ = ()


def expand_urls(urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """The shards that a pattern, or a list of them, names: braces first, then globs, each glob in sorted order.

    A name that is a file as it stands is that file, whatever signs are in it.

    Raises:
        ValueError: a pattern names nothing, a folder or a missing file, or its scheme is refused or unknown.
    """
    if isinstance(urls, ListedUrls):
        return list(urls)
    patterns = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    if not patterns:
        raise ValueError("urls is empty: name at least one shard")
    found: list[str] = []
    for pattern in list[object](patterns):
        if not isinstance(pattern, str | os.PathLike):
            raise ValueError(f"urls holds {pattern!r}: each must be a path or a URL, as text")
        text = os.fspath(pattern)
        if not text:
            raise ValueError("urls holds an empty string: name a path or a URL")
        matched = _expand(text)
        if not matched:
            raise ValueError(f"{public_url(text)!r} matches nothing: check the path, or list the shards")
        found += matched
        if len(found) > MAX_SHARDS:
            raise ValueError(f"{public_url(text)!r}: more than {MAX_SHARDS} shards")
    _check_there(found)
    if len(set(found)) < len(found):
        logger.warning("%d shards are named more than once; each naming is read", len(found) - len(set(found)))
    return found


def _check_there(found: Sequence[str]) -> None:
    """Looks whether local shards are there: at all of a short list, at `MAX_CHECKED` of a long one, its first and last among them.

    Thousands of ranks that ask a shared file system for every one of many shards would be what it is busy with; a shard that is missing after
    all is told when it is its turn.
    """
    count = min(len(found), MAX_CHECKED)
    checked = {found[place * (len(found) - 1) // max(1, count - 1)] for place in range(count)} if len(found) > count else found
    missing: list[str] = []
    for url in checked:
        path = local_path(url)
        if path is None:
            continue
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):
            missing.append(url)
        else:
            if stat.S_ISDIR(mode):
                _file(path)
    if missing:
        missing.sort()
        shown = ", ".join(repr(url) for url in missing[:5]) + (", ..." if len(missing) > 5 else "")
        looked = f"{len(found)} shards" if checked is found else f"{len(checked)} looked at, of {len(found)} shards,"
        raise ValueError(f"{len(missing)} of {looked} are not there: {shown}")


def _expand(pattern: str) -> list[str]:
    scheme_of(pattern)
    path = local_path(pattern)
    if path is not None and "{" not in path and not _MAGIC.search(path):
        return [path]  # looked at with the others
    if path is not None and os.path.exists(path):
        return [_file(path)]
    found: list[str] = []
    for url in expand_braces(pattern):
        found += _matches(url)
        if len(found) > MAX_SHARDS:
            raise ValueError(f"{public_url(pattern)!r} names more than {MAX_SHARDS} shards")
    return found


def _matches(url: str) -> list[str]:
    """One URL without braces, its globs resolved."""
    path = local_path(url)
    if path is not None:
        if not _MAGIC.search(path):
            return [path]  # looked at with the others
        if os.path.exists(path):
            return [_file(path)]
        return _listed(path)
    scheme = scheme_of(url)
    if scheme in ("http", "https"):
        _host(url)
        if "*" in url.partition("?")[0]:
            raise ValueError(f"{public_url(url)!r}: a web server does not list its files; write the names out, as in {{000..127}}")
        return [url]
    _known(url, scheme)
    if not _MAGIC.search(url.partition("://")[2]):
        return [url]
    from fsspec.core import url_to_fs

    try:
        files, inside = url_to_fs(url)
        return sorted(str(files.unstrip_protocol(match)) for match in files.glob(inside))
    except OSError as error:
        raise ValueError(f"{public_url(url)!r} cannot be listed: {type(error).__name__}") from None


def _listed(pattern: str) -> list[str]:
    """The files that a local glob names, in order, without asking for each of a folder's files what it is."""
    folder, name = os.path.split(pattern)
    if _MAGIC.search(folder) or name == "**":
        return [match for match in sorted(glob.glob(pattern, recursive=True)) if not os.path.isdir(match)]
    try:
        with os.scandir(folder or ".") as entries:
            names = [entry.name for entry in entries if not entry.is_dir()]
    except OSError:
        return []
    hidden = name.startswith(".")
    return sorted(os.path.join(folder, match) for match in fnmatch.filter(names, name) if hidden or not match.startswith("."))


def _host(url: str) -> None:
    """Refuses a web address that nobody can be asked at, before anybody is asked again and again."""
    try:
        place = urlsplit(url)
        reachable = bool(place.hostname) and place.port != 0
    except ValueError:
        reachable = False
    if not reachable:
        raise ValueError(f"{public_url(url)!r}: a web address names a host, and a port from 1 to 65535 if any")


def _known(url: str, scheme: str) -> None:
    from fsspec.registry import known_implementations, registry

    if scheme not in registry and scheme not in known_implementations:
        raise ValueError(f"{public_url(url)!r}: nothing opens {scheme}:// URLs; local paths, http(s) and what fsspec knows are opened")


def _file(path: str) -> str:
    if os.path.isdir(path):
        raise ValueError(f"{path!r} is a folder: to read the shards in it write {os.path.join(path, '*.tar')!r}")
    return path


@dataclass(frozen=True, slots=True)
class Source:
    """Shards that are shuffled together, and their share of a blend.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    urls: str | Sequence[str]
    """A path, a URL, a pattern with globs and `{000..127}` braces, or a list of those."""
    weight: float = 1.0
    """Share of the blend, relative to the other sources' weights."""
    repeat: bool = False
    """What becomes of it once its epochs are over: False stops it, and its share goes to the others; True begins it again for as long as
    others go on, and it then never ends a lane."""

    def __post_init__(self) -> None:
        given: object = self.urls
        if isinstance(given, os.PathLike):
            object.__setattr__(self, "urls", os.fspath(given))
        elif not isinstance(given, str | ListedUrls):
            if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
                raise ValueError(f"Source.urls is {shown(given)}: it must be a path, a URL or a pattern, as text, or a list of them")
            object.__setattr__(self, "urls", tuple(given))
            strange = next((url for url in list[object](self.urls) if not isinstance(url, str | os.PathLike)), None)
            if strange is not None:
                raise ValueError(f"Source.urls holds {shown(strange)}: each must be a path, a URL or a pattern, as text")
        settle_numbers(self)
        _check_blend(self.weight, self.repeat)

    def expanded(self) -> list[str]:
        """Its shards, in order.

        Raises:
            ValueError: as `expand_urls`.
        """
        return expand_urls(self.urls)


def _check_blend(weight: object, repeat: object) -> None:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ValueError(f"Source.weight is {weight!r}: it must be a positive number; leave a source out to weigh it zero")
    if not isinstance(repeat, bool):
        raise ValueError(f"Source.repeat is {repeat!r}: it must be True or False")


def urls_digest(urls: Sequence[str]) -> str:
    """A digest of shards in order."""
    digest = blake2b(digest_size=16, person=b"treadle urls")
    for begin in range(0, len(urls), 4096):
        raws = [url.encode("utf-8", "surrogateescape") for url in urls[begin : begin + 4096]]
        digest.update(b"".join(len(raw).to_bytes(8, "little") + raw for raw in raws))
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestSource:
    """One source as the manifest has it."""

    urls: tuple[str, ...]
    """Its shards in order, without credentials; empty when there are more than `MAX_URLS_IN_MANIFEST` and it was read back."""
    num_shards: int
    digest: str
    """Of the shards in order."""
    weight: float = 1.0
    repeat: bool = False

    @classmethod
    def of(cls, urls: Sequence[str], weight: float = 1.0, repeat: bool = False) -> Self:
        """A source of resolved shard URLs."""
        public = tuple(public_url(url) for url in urls)
        return cls(urls=public, num_shards=len(public), digest=urls_digest(public), weight=float(weight), repeat=repeat)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The source that `Manifest.to_dict` wrote."""
        given = dict(plain)
        given["urls"] = tuple(plain["urls"])
        return cls(**given)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that a stream's order and batches are a function of. A state met with another one is refused."""

    sources: tuple[ManifestSource, ...]
    seed: int
    lanes: int
    shuffle: int
    """Samples held back over all lanes."""
    shuffle_bytes: int
    """Most tar bytes that are held back over all lanes."""
    epochs: int | None
    schema: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the batches depend on: decode options, window, edge capacity."""

    def to_dict(self) -> dict[str, Any]:
        """The manifest as JSON has it."""
        listed = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        # Not `asdict`, which copies every URL of a long list only for it to be left out.
        listed["sources"] = [
            {
                "urls": list(source.urls) if source.num_shards <= MAX_URLS_IN_MANIFEST else [],
                "num_shards": source.num_shards,
                "digest": source.digest,
                "weight": source.weight,
                "repeat": source.repeat,
            }
            for source in self.sources
        ]
        plain: dict[str, Any] = json.loads(json.dumps(listed))
        return plain

    def to_json(self) -> str:
        """Canonical JSON: keys sorted, no spaces."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The manifest that `to_dict` wrote.

        Raises:
            ValueError: it is not one.
        """
        try:
            given = dict(plain)
            given["sources"] = tuple(ManifestSource.from_dict(source) for source in plain["sources"])
            return cls(**given)
        except (TypeError, KeyError) as error:
            raise ValueError(f"this is no stream manifest: {error}") from None

    @property
    def digest(self) -> str:
        """A digest of everything in it."""
        plain = self.to_dict()
        for source in plain["sources"]:
            del source["urls"]
        canonical = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
        return blake2b(canonical, digest_size=16, person=b"treadle manifest").hexdigest()

    def differences(self, other: "Manifest") -> list[str]:
        """What differs, as `name: mine is not theirs`; empty where nothing does."""
        mine, theirs = self.to_dict(), other.to_dict()
        found: list[str] = []
        pairs = list(zip(mine.pop("sources"), theirs.pop("sources"), strict=False))
        if len(self.sources) != len(other.sources):
            found.append(f"sources: {len(self.sources)} is not {len(other.sources)}")
        for place, (left, right) in enumerate(pairs):
            found += _urls_differences(f"sources[{place}]", left, right)
            for name in ("weight", "repeat"):
                if left[name] != right[name]:
                    found.append(f"sources[{place}].{name}: {left[name]} is not {right[name]}")
        return found + _differences("", mine, theirs)


def _urls_differences(where: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    if mine["num_shards"] != theirs["num_shards"]:
        return [f"{where}.urls: {mine['num_shards']} shards are not {theirs['num_shards']}"]
    if mine["digest"] == theirs["digest"]:
        return []
    for place, (left, right) in enumerate(zip(mine["urls"], theirs["urls"], strict=False)):
        if left != right:
            return [f"{where}.urls[{place}]: {left!r} is not {right!r}"]
    return [f"{where}.urls: these {mine['num_shards']} shards are not those, or not in that order"]


def _differences(where: str, mine: Any, theirs: Any) -> list[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        found: list[str] = []
        for name in sorted(set(mine) | set(theirs)):
            found += _differences(f"{where}.{name}" if where else name, mine.get(name), theirs.get(name))
        return found
    return [] if mine == theirs else [f"{where}: {mine!r} is not {theirs!r}"]
