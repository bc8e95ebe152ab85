"""Versions, specifiers and markers, against the library that defines them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.markers import Marker
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from pellucid.tracer.requirements import MARKERS, Requirement, marker_holds, parse_requirement, version_key

NUMBERS = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(lambda parts: ".".join(map(str, parts)))
STAGES = st.sampled_from(["", "", "a1", "b2", "rc1", ".post1", ".dev3", "rc2.dev1", ".post1.dev2"])
VERSIONS = st.builds(str.__add__, NUMBERS, STAGES)


@given(VERSIONS, VERSIONS)
def test_versions_are_ordered_as_pep_440_orders_them(left: str, right: str) -> None:
    expected = (Version(left) > Version(right)) - (Version(left) < Version(right))
    assert (version_key(left) > version_key(right)) - (version_key(left) < version_key(right)) == expected


@given(VERSIONS, st.sampled_from(["==", "!=", ">=", "<=", ">", "<"]), VERSIONS)
def test_a_specifier_allows_what_pip_would_take(version: str, symbol: str, asked: str) -> None:
    specifier = symbol + asked
    expected = SpecifierSet(specifier).contains(version, prereleases=True)
    assert Requirement("x", specifier).allows(version) == expected


@given(VERSIONS, st.sampled_from(["==", "!="]), NUMBERS)
def test_a_wildcard_is_a_prefix_of_numbers(version: str, symbol: str, asked: str) -> None:
    specifier = f"{symbol}{asked}.*"
    assert Requirement("x", specifier).allows(version) == SpecifierSet(specifier).contains(version, prereleases=True)


@given(VERSIONS, NUMBERS.filter(lambda text: "." in text))
def test_a_compatible_release_keeps_all_but_the_last_number(version: str, asked: str) -> None:
    specifier = f"~={asked}"
    assert Requirement("x", specifier).allows(version) == SpecifierSet(specifier).contains(version, prereleases=True)


def test_every_clause_must_hold_and_one_that_cannot_be_read_does_not() -> None:
    requirement = Requirement("transformers", ">=4.56.0,<5")
    assert requirement.allows("4.57.1")
    assert not requirement.allows("5.0.0")
    assert not requirement.allows("5.0.0rc1")
    assert not Requirement("x", "===1.0").allows("1.0")
    assert Requirement("torch", "==2.13.0").allows("2.13.0+cpu")


@pytest.mark.parametrize(
    "marker",
    [
        'sys_platform == "linux"',
        'sys_platform != "linux" or (platform_machine != "aarch64" and platform_machine != "arm64")',
        'platform_system == "Darwin" and platform_machine == "arm64"',
        'python_version < "3.13"',
        'python_version >= "3.9" and platform_machine in "x86_64 s390x"',
        '"arm" not in platform_machine',
        'extra == "audio"',
        'python_full_version > "3.10.0"',
        'implementation_name == "pypy"',
    ],
)
def test_markers_hold_as_they_would_on_linux_x86_64(marker: str) -> None:
    assert marker_holds(marker) == Marker(marker).evaluate({**MARKERS, "extra": ""})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flashinfer_python==0.6.3", Requirement("flashinfer-python", "==0.6.3")),
        ("transformers (>=4.56.0, <5)", Requirement("transformers", ">=4.56.0,<5")),
        ("humming-kernels[cu13]==0.1.12", Requirement("humming-kernels", "==0.1.12")),
        ('av; sys_platform == "linux" and platform_machine == "aarch64"', None),
        ('pytest>=8; extra == "test"', None),
        ("IPython", Requirement("ipython")),
        ("kernels @ https://example.org/kernels.whl", None),
    ],
)
def test_a_line_of_metadata_becomes_a_requirement(line: str, expected: Requirement | None) -> None:
    assert parse_requirement(line) == expected


@pytest.mark.parametrize(
    ("specifier", "pin"),
    [("==4.57.1", "4.57.1"), (">=0.7.11,<0.8.0", "0.7.11"), ("~=1.2", "1.2"), ("<2", None), ("", None)],
)
def test_the_pin_is_the_exact_version_else_the_least(specifier: str, pin: str | None) -> None:
    assert Requirement("x", specifier).pin == pin
