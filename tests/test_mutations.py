"""The faults of tests/mutations.txt can be put where they say, and name tests that exist."""

from tests.mutations import ROOT, TABLE, Fault, read_table


def test_every_line_that_a_fault_replaces_stands_once_in_its_file() -> None:
    faults = read_table(TABLE.read_text())
    sources = {fault.file: (ROOT / fault.file).read_text() for fault in faults}
    assert [str(fault) for fault in faults if sources[fault.file].count(fault.before) != 1] == []
    assert [str(fault) for fault in faults if fault.before == fault.after] == []


def test_every_fault_names_a_test_that_exists() -> None:
    def exists(fault: Fault) -> bool:
        file, _, name = fault.test.partition("::")
        return f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()

    assert [str(fault) for fault in read_table(TABLE.read_text()) if not exists(fault)] == []
