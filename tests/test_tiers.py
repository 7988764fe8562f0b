"""The list of slow tests names tests that exist, and leaves some case of every test to `make test`."""

from __future__ import annotations

from pathlib import Path

from tests.tiers import divided, listed

ROOT = Path(__file__).parent.parent


def test_listed_tests_exist() -> None:
    tiers = listed()
    assert set(tiers.values()) == {"full", "large"}
    functions = {test.partition("[")[0] for test in tiers}
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in {name.split("::")[0] for name in functions}}
    missing = [name for name in functions if f"def {name.split('::')[-1]}(" not in texts[name.split("::")[0]]]
    assert not missing, "tests have other names now: run `python -m tests.tiers` on the log of a run, or correct slow_tests.txt"


def test_each_value_of_a_parameter_stays_where_it_is_cheapest() -> None:
    slow = {f"t/test_a.py::test_x[{case}]": 3.0 for case in ("mirrored-float", "zero-float", "zero-half", "mirrored-half")}
    tiers = divided({**slow, "t/test_a.py::test_y[mirrored-float]": 0.1, "t/test_a.py::test_z": 0.3})
    kept = {test for test in slow if tiers[test] == "full"}
    assert kept == {"t/test_a.py::test_x[zero-half]"}  # test_y brings the others
    assert {tiers[test] for test in slow if test not in kept} == {"large"}
    assert tiers["t/test_a.py::test_z"] == "full"
    assert "t/test_a.py::test_y[mirrored-float]" not in tiers
