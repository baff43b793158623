"""The faults of tests/mutations.txt can be put where they say."""

from tests.mutations import ASKED, ROOT, TABLE, read_table


def test_every_line_that_a_fault_replaces_stands_once_in_its_file() -> None:
    faults = read_table(TABLE.read_text())
    sources = {fault.file: (ROOT / fault.file).read_text() for fault in faults}
    assert [str(fault) for fault in faults if sources[fault.file].count(fault.before) != 1] == []
    assert [str(fault) for fault in faults if fault.before == fault.after] == []


def test_every_folder_that_has_a_fault_has_tests_that_are_asked() -> None:
    folders = {fault.folder for fault in read_table(TABLE.read_text())}
    assert folders == ASKED.keys()
    asked = [one for lists in ASKED.values() for arguments in lists for one in arguments if one.startswith("tests/")]
    assert [one for one in asked if not (ROOT / one).exists()] == []
