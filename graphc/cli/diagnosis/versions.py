"""Compares installed packages with the versions that graphc declares."""

from __future__ import annotations

import functools
import importlib.metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from graphc.cli.diagnosis.finding import Finding


@functools.cache
def declared() -> dict[str, Requirement]:
    """Canonical package name → version requirement of graphc, or of its first extra that names the package."""
    found: dict[str, Requirement] = {}
    for line in importlib.metadata.requires("graphc") or ():
        requirement = Requirement(line)
        found.setdefault(canonicalize_name(requirement.name), requirement)
    return found


def wanted(name: str, version: str) -> str:
    """Return the required versions if the installed one is not among them; otherwise ""."""
    requirement = declared().get(canonicalize_name(name))
    if requirement is None or requirement.specifier.contains(version, prereleases=True):
        return ""
    return str(requirement.specifier)


def installed(name: str, version: str, remedy: str) -> Finding:
    """Make the finding about an installed package."""
    try:
        asked = wanted(name, version)
    except InvalidVersion:
        asked = ""
    return Finding(name, "other", f"{version}, tried with {asked}; {remedy}") if asked else Finding(name, "ok", version)


def pinned(name: str) -> str:
    """Make pip's requirement: the name with the versions that graphc requires."""
    requirement = declared().get(canonicalize_name(name))
    return f"{name}{requirement.specifier}" if requirement is not None else name
