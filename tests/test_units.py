from collections import Counter
from pathlib import Path

from tests.units import UNITS, find_place, find_unit

ROOT = Path(__file__).parent.parent


def test_every_file_that_a_unit_names_is_there_and_in_one_unit():
    files = Counter(path for unit in UNITS for path in unit)
    assert [path for path in files if not (ROOT / path).is_file()] == []
    assert max(files.values()) == 1


def test_tests_of_one_unit_stay_together_and_long_ones_come_first():
    first, second = UNITS[0][:2]
    assert find_unit(f"{second}::test_a[b::c]") == find_unit(f"{first}::test_d")
    assert find_unit("tests/test_units.py::test_a") == "tests/test_units.py"
    assert find_place(first) == find_place(second) == 0
    assert find_place(UNITS[1][0]) == 1 < find_place("tests/test_units.py")
