"""What a wheel's metadata requires, and which versions meet it."""

from __future__ import annotations

import pytest

from pellucid.tracer.requirements import Requirement, parse_requirement, version_key


def test_versions_are_ordered_as_pep_440_orders_them_and_what_is_none_comes_first() -> None:
    ordered = ["checkout", "0.5.9", "0.5.10.dev1", "0.5.10rc1", "0.5.10", "0.5.10.post1"]
    scrambled = ["0.5.10", "0.5.10rc1", "0.5.10.post1", "checkout", "0.5.10.dev1", "0.5.9"]
    assert sorted(scrambled, key=version_key) == ordered


def test_every_clause_must_hold_and_one_that_cannot_be_read_does_not() -> None:
    requirement = Requirement("transformers", ">=4.56.0,<5")
    assert requirement.allows("4.57.1")
    assert not requirement.allows("5.0.0")
    assert not requirement.allows("5.0.0rc1")
    assert not Requirement("x", "=>1.0").allows("1.0")
    assert not Requirement("x", ">=1.0").allows("checkout")
    assert Requirement("torch", "==2.13.0").allows("2.13.0+cpu")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flashinfer_python==0.6.3", Requirement("flashinfer-python", "==0.6.3")),
        ("transformers (>=4.56.0, <5)", Requirement("transformers", "<5,>=4.56.0")),
        ("humming-kernels[cu13]==0.1.12", Requirement("humming-kernels", "==0.1.12")),
        ('av; sys_platform == "linux" and platform_machine == "aarch64"', None),
        ('av; sys_platform == "linux" and platform_machine != "aarch64"', Requirement("av")),
        ('tomli; python_version < "3.9"', None),
        ('pytest>=8; extra == "test"', None),
        ("IPython", Requirement("ipython")),
        ("no requirement at all", None),
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
