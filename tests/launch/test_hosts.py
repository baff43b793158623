"""Lists of host names: ranges, what is refused, and what is suggested."""

import pytest

from lowtide.launch.hosts.host import LaunchError
from lowtide.launch.hosts.names import expand, expand_one, folded, parse_numbers, split_outside_brackets, suggestion


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a[01-03,7],b5", ["a01", "a02", "a03", "a7", "b5"]),
        ("gnode[10,20,25]", ["gnode10", "gnode20", "gnode25"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("rack[0-1]n[1-2]-ib", ["rack0n1-ib", "rack0n2-ib", "rack1n1-ib", "rack1n2-ib"]),
        ("a, b ,,c", ["a", "b", "c"]),
        ("root@h1.example.org", ["root@h1.example.org"]),
        ("fe80::1", ["fe80::1"]),
        ("10.0.0.1", ["10.0.0.1"]),
        ("", []),
    ],
)
def test_a_list_of_names_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["node[01-12]", "a[1-3],b,c[7-8]-ib"])
def test_what_is_folded_expands_to_the_same(text: str) -> None:
    assert expand(folded(expand(text))) == expand(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("n[1-", 'expected "node[01-03,07]", found "n[1-" with an unmatched bracket: close it'),
        ("n1]", 'found "n1]" with an unmatched bracket'),
        ("n[[1-2]]", "an unmatched bracket"),
        ("n[3-1]", 'the range "3-1" in "n[3-1]" ends before it starts: swap its ends'),
        ("n[a-b]", 'expected numbers and ranges like "0-3,7", found "a-b" in "n[a-b]"'),
        ("n[]", 'expected numbers and ranges like "0-3,7", found "" in "n[]"'),
        ("n[0-99999999]", 'the range "0-99999999" in "n[0-99999999]" has more than 65536 numbers: check it'),
        ("n[0-999][0-999]", '"n[0-999][0-999]" is 1000000 hosts, more than the limit of 65536'),
        ("-oProxyCommand=x", 'expected a host name, found "-oProxyCommand=x"'),
        ("a;b", 'expected a host name, found "a;b". Use letters, digits, ".", "-" and "_"'),
        ("$(id)", 'expected a host name, found "$(id)"'),
    ],
)
def test_what_is_no_list_of_names_is_explained(text: str, error: str) -> None:
    with pytest.raises(LaunchError) as caught:
        expand_one(text)
    assert error in str(caught.value)


def test_numbers_are_a_list_of_ranges() -> None:
    assert parse_numbers("0-2,5") == [0, 1, 2, 5]


def test_separators_within_brackets_do_not_cut() -> None:
    assert split_outside_brackets("a[1,2],b", ",") == ["a[1,2]", "b"]


def test_a_name_that_is_close_is_suggested() -> None:
    assert suggestion("nod1", ["login", "node1"]) == 'did you mean "node1"?'


def test_without_a_close_name_there_is_a_list() -> None:
    assert suggestion("zzz", [f"n{number}" for number in range(10)]) == "there are n0, n1, n2, n3, n4, n5, n6, n7, ..."
