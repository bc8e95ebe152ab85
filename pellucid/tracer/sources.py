"""The source of an engine: a wheel's Python files in the cache, or an installed copy. Used by `tracer.run` and the CLI.

Nothing of an engine is imported here: a tree is read as files, its requirements from METADATA, its compiled extensions
from RECORD.
"""

from __future__ import annotations

import compileall
import csv
import hashlib
import importlib.metadata
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from typing import Literal, get_args

from packaging.utils import canonicalize_name

from pellucid.core import PellucidError
from pellucid.tracer.pip import Progress, download
from pellucid.tracer.requirements import Requirement, parse_requirement, version_key
from pellucid.utils.cache import cache_dir, make_cache_dir

Engine = Literal["sglang", "vllm"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

_VERSION = re.compile(r"\d[\w.+!-]*")
_NOTE = "source.json"


@dataclass(frozen=True, slots=True)
class SourceTree:
    """The files of one version: `root / engine` is its package, and nothing else that can be imported is below `root`.

    `requires` has the requirements that hold on Linux x86-64, by normalised name. `extension_modules` are the compiled
    modules that the package would bring (dotted names); their files are not here. `sha256` is the wheel's.
    """

    engine: Engine
    version: str
    root: Path
    requires: Mapping[str, Requirement]
    extension_modules: tuple[str, ...] = ()
    sha256: str | None = None

    @property
    def pins(self) -> dict[str, str | None]:
        """Normalised name -> the version that it asks for exactly, else at least, else None."""
        return {name: requirement.pin for name, requirement in self.requires.items()}

    def __str__(self) -> str:
        return f"{self.engine} {self.version}"


def check_engine(name: str) -> Engine:
    """Raises PellucidError for an engine that the tracer does not know."""
    if name not in ENGINES:
        raise PellucidError(f"{name!r} is no engine that can be traced; known: {', '.join(ENGINES)}")
    return name


def find(
    engine: Engine, version: str | None = None, path: Path | None = None, progress: Progress | None = None
) -> SourceTree:
    """The tree that the user means: in the folder `path`; of `version`, fetched if need be; else the one at hand.

    At hand is the copy that the running Python has installed, else the newest version in the cache.

    Raises:
        PellucidError: there is none, or it can't be read or fetched.
    """
    if path is not None:
        tree = installed(engine, path)
        if version not in (None, tree.version):
            raise PellucidError(f"{path} holds {tree}, not version {version}; leave out --version or --path")
        return tree
    if version is not None:
        return fetch(engine, version, progress)
    for folder in _installed_in():
        if (folder / engine).is_dir() and any(folder.glob(f"{engine}-*.dist-info")):
            return installed(engine, folder)
    if versions := cached(engine):
        return _load(_folder(engine, versions[0]))
    raise PellucidError(
        f"no {engine} is here: name a version (--version X downloads its wheel) or a site-packages folder (--path)"
    )


def cached(engine: Engine) -> tuple[str, ...]:
    """Versions in the cache, the newest first."""
    found = [path.parent.name.removeprefix(f"{engine}-") for path in _sources().glob(f"{engine}-*/{_NOTE}")]
    return tuple(sorted(found, key=version_key, reverse=True))


def fetch(engine: Engine, version: str, progress: Progress | None = None) -> SourceTree:
    """The tree of a released version: from the cache, else pip downloads its wheel, of which the sources are kept.

    Raises:
        PellucidError: there is no such version, the package index can't be reached, or the cache can't be written.
    """
    if not _VERSION.fullmatch(version):
        raise PellucidError(f"{engine}: {version!r} is no version; give one such as 0.5.9")
    folder = _folder(engine, version)
    if not (folder / _NOTE).exists():
        make_cache_dir(_sources())
        with temporary_folder(_sources()) as scratch:
            wheel = download(engine, version, scratch, progress)
            _unpack(wheel, engine, version, progress)
    return _load(folder)


def add_wheel(wheel: Path, progress: Progress | None = None) -> SourceTree:
    """The tree of a wheel file that the user has, copied to the cache: for machines without a network.

    Raises:
        PellucidError: it is not a wheel of a known engine.
    """
    if not wheel.is_file():
        raise PellucidError(f"{wheel}: no such wheel; give a file such as sglang-0.5.9-py3-none-any.whl")
    name, _, rest = wheel.name.partition("-")
    engine, version = check_engine(name), rest.partition("-")[0]
    if not _VERSION.fullmatch(version):
        raise PellucidError(f"{wheel}: its name has no version; give a file such as {engine}-0.5.9-py3-none-any.whl")
    make_cache_dir(_sources())
    _unpack(wheel, engine, version, progress, replace=True)
    return _load(_folder(engine, version))


def installed(engine: Engine, site_packages: Path) -> SourceTree:
    """The copy in a site-packages folder, requirements replaced by the versions that are installed beside it.

    Its tree is a folder of links to that copy alone: the other packages there must not answer for the child's.

    Raises:
        PellucidError: the folder has no engine, or one without its metadata (a checkout).
    """
    site_packages = site_packages.expanduser().resolve()
    found = sorted(path.parent for path in site_packages.glob(f"{engine}-*.dist-info/METADATA"))
    if not (site_packages / engine).is_dir() or len(found) != 1:
        what = f"{len(found)} copies of its metadata" if found else f"no {engine}-*.dist-info"
        missing = "" if (site_packages / engine).is_dir() else f"no folder {engine}/ and "
        raise PellucidError(
            f"--path {site_packages}: {missing}{what}; give the folder that "
            f"`pip install --no-deps --target FOLDER {engine}==X` or a plain install fills (a checkout has no metadata)"
        )
    tree = _read(engine, site_packages, found[0])
    beside = versions_in(site_packages)
    requires = {
        name: Requirement(name, f"=={beside[name]}") if name in beside else requirement
        for name, requirement in tree.requires.items()
    }
    # The metadata's path names the engine and its version too.
    view = cache_dir("trace", "installed", hashlib.sha256(str(found[0]).encode()).hexdigest()[:16])
    make_cache_dir(view)
    for target in (site_packages / engine, found[0]):
        link = view / target.name
        if not (link.is_symlink() and link.readlink() == target):
            _replace_link(link, target)
    return SourceTree(engine, tree.version, view, requires, tree.extension_modules)


def versions_in(*folders: Path) -> dict[str, str]:
    """What is installed in site-packages folders, by normalised name; the first folder wins, as in an import."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=[str(folder) for folder in folders]):
        # A link that is dead, or a broken installation, has no metadata.
        if "Name" in distribution.metadata:
            found.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution.version)
    return found


def _replace_link(link: Path, target: Path) -> None:
    # Another process may do the same at this moment: the last rename wins, and both are right.
    with temporary_folder(link.parent) as scratch:
        (scratch / "link").symlink_to(target)
        (scratch / "link").replace(link)


def _installed_in() -> Iterator[Path]:
    yield from (Path(entry) for entry in sys.path if entry and Path(entry).is_dir())


def _sources() -> Path:
    return cache_dir("trace", "sources")


def _folder(engine: Engine, version: str) -> Path:
    return _sources() / f"{engine}-{version}"


def _load(folder: Path) -> SourceTree:
    try:
        note = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
        metadata = next(iter(folder.glob("*.dist-info")), None)
        if metadata is None:
            raise ValueError("its metadata is gone")
        tree = _read(check_engine(note["engine"]), folder, metadata)
        return SourceTree(
            tree.engine, tree.version, tree.root, tree.requires, tree.extension_modules, str(note["sha256"])
        )
    except (OSError, ValueError, KeyError) as error:
        raise PellucidError(
            f"the cached tree {folder} can't be read ({error}); remove that folder and try again"
        ) from None


def _read(engine: Engine, root: Path, metadata: Path) -> SourceTree:
    distribution = importlib.metadata.PathDistribution(metadata)
    parsed = [parse_requirement(text) for text in distribution.requires or ()]
    requires = {one.name: one for one in parsed if one is not None}
    record = (metadata / "RECORD").read_text(encoding="utf-8") if (metadata / "RECORD").exists() else ""
    names = (row[0] for row in csv.reader(record.splitlines()) if row)
    return SourceTree(engine, distribution.version, root, requires, tuple(sorted(_extensions(names, engine))))


def _extensions(names: Iterator[str], engine: str) -> set[str]:
    """Dotted names: `vllm/_C.abi3.so` is `vllm._C`."""
    files = (PurePosixPath(name) for name in names if name.endswith(".so"))
    return {".".join((*file.parent.parts, file.name.partition(".")[0])) for file in files if file.parts[0] == engine}


def _unpack(wheel: Path, engine: Engine, version: str, progress: Progress | None, *, replace: bool = False) -> None:
    """Write the wheel's Python files and metadata into the cache, all or nothing."""
    if progress is not None:
        progress(f"unpacking and compiling {engine} {version}")
    folder = _folder(engine, version)
    with temporary_folder(_sources()) as scratch:
        tree = scratch / "tree"
        try:
            with zipfile.ZipFile(wheel) as archive:
                for name in filter(_is_kept, archive.namelist()):
                    archive.extract(name, tree)
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise PellucidError(f"{wheel.name} can't be unpacked: {error}; download it again") from None
        if not (tree / engine).is_dir() or not any(tree.glob("*.dist-info/METADATA")):
            raise PellucidError(f"{wheel.name} holds no package {engine} with its metadata")
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        # The traced process writes nothing, so bytecode that is not here now would be made anew every time.
        compileall.compile_dir(tree / engine, ddir=str(folder / engine), quiet=2)
        note = {"engine": engine, "version": version, "wheel": wheel.name, "sha256": digest}
        (tree / _NOTE).write_text(json.dumps(note), encoding="utf-8")
        # Another process may have been faster, and may be tracing it.
        if replace or not (folder / _NOTE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            tree.rename(folder)


def _is_kept(name: str) -> bool:
    """Python sources, and the small texts of `*.dist-info/` (METADATA, RECORD, entry_points.txt)."""
    path = PurePosixPath(name)
    return name.endswith(".py") or (len(path.parts) == 2 and path.parts[0].endswith(".dist-info"))


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Beside what will be renamed into place: a rename does not cross file systems.

    Raises:
        PellucidError: it can't be made.
    """
    try:
        folder = Path(mkdtemp(prefix=".part-", dir=parent))
    except OSError as error:
        raise PellucidError(
            f"the cache {parent} can't be written ({error.strerror}); set PELLUCID_CACHE to a folder that can"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
