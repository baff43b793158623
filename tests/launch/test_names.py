"""Lists of hosts: ranges of names, hostfiles, --hosts, --include and --exclude, and what they say about mistakes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.launch.hosts.host import Host, LaunchError
from lowtide.launch.hosts.names import (
    expand,
    expand_one,
    folded,
    parse_hostfile,
    parse_hosts,
    read_hostfile,
    select,
    suggestion,
)
from tests.kit.training import refusal


def host(name: str, count: int | None = None) -> Host:
    return Host(name, None if count is None else tuple(range(count)))


def hostfile(text: str) -> list[Host]:
    return list(parse_hostfile(text, "hosts.txt"))


def hosts_option(text: str) -> list[Host]:
    return list(parse_hosts(text))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a[01-03,7],b5", ["a01", "a02", "a03", "a7", "b5"]),
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
    assert expand(text) == names and expand(folded(names)) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["node1", "node2", "node3", "login"], "node[1-3],login"),
        (["node01", "node02", "node09", "node10"], "node[01-02],node[09-10]"),
        (["n9", "n10"], "n[9-10]"),
        (["n09", "n9"], "n09,n9"),
        (["n2", "n1"], "n2,n1"),
        (["r1n1-ib", "r1n2-ib", "r2n3-ib"], "r1n[1-2]-ib,r2n3-ib"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        (["a", "a1", "a2"], "a,a[1-2]"),
    ],
)
def test_names_that_count_up_are_folded(names: list[str], text: str) -> None:
    assert folded(names) == text


@pytest.mark.parametrize(
    ("parse", "text", "hosts"),
    [
        (hostfile, "worker-1 slots=4\nworker-2 slots=4\n", [host("worker-1", 4), host("worker-2", 4)]),
        (hostfile, "# all\n\n  a slots=2  # the first\n#b slots=2\nc#x\n", [host("a", 2), host("c")]),
        (hostfile, "aa slots=2 max_slots=4\nbb max-slots=3 slots=3", [host("aa", 2), host("bb", 3)]),
        (hostfile, "node1:8\nnode2", [host("node1", 8), host("node2")]),
        (hostfile, "n[01-02,07] slots=8", [host("n01", 8), host("n02", 8), host("n07", 8)]),
        (hostfile, "n[1-2]:2", [host("n1", 2), host("n2", 2)]),
        (hostfile, "a slots = 2\r\nb\tSLOTS=1\r\n", [host("a", 2), host("b", 1)]),
        (hostfile, "fe80::1 slots=1\nroot@10.0.0.2:2", [host("fe80::1", 1), host("root@10.0.0.2", 2)]),
        (hosts_option, "a:8,b:8", [host("a", 8), host("b", 8)]),
        (hosts_option, "n[1-3]:4", [host("n1", 4), host("n2", 4), host("n3", 4)]),
        (hosts_option, "n[1,3],login:1", [host("n1"), host("n3"), host("login", 1)]),
        (hosts_option, "localhost", [host("localhost")]),
    ],
)
def test_hosts_have_the_syntax_of_deepspeed_and_of_mpi(
    parse: Callable[[str], list[Host]], text: str, hosts: list[Host]
) -> None:
    assert parse(text) == hosts


HOSTS = (host("w0", 4), host("w1", 4), host("w2"))


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (None, None, HOSTS),
        ("w1@w0:0,2", None, (Host("w0", (0, 2)), host("w1", 4))),
        ("w0:3,1", None, (Host("w0", (3, 1)),)),
        ("w[0-1]:0-1", None, (Host("w0", (0, 1)), Host("w1", (0, 1)))),
        ("w2:5", None, (Host("w2", (5,)),)),
        (None, "w1:0", (host("w0", 4), Host("w1", (1, 2, 3)), host("w2"))),
        (None, "w[0-1]", (host("w2"),)),
        (None, "w2:0,1", (host("w0", 4), host("w1", 4), Host("w2", None, (0, 1)))),
        (None, "w0:0-3", (host("w1", 4), host("w2"))),
        ("w0@w1", "w1:3@w2", (host("w0", 4), Host("w1", (0, 1, 2)))),
    ],
)
def test_include_and_exclude_choose_hosts_and_slots(
    include: str | None, exclude: str | None, left: tuple[Host, ...]
) -> None:
    assert select(HOSTS, include, exclude) == left


def test_a_host_with_a_user_is_chosen_by_its_name() -> None:
    assert select((Host("root@h1"), Host("root@h2")), "h2", None) == (Host("root@h2"),)


def test_a_name_that_is_close_is_suggested_else_there_is_a_list() -> None:
    assert suggestion("nod1", ["login", "node1"]) == 'did you mean "node1"?'
    assert (
        suggestion("zzz", [f"n{number}" for number in range(10)]) == "choose from n0, n1, n2, n3, n4, n5, n6, n7, ..."
    )


def include(text: str) -> tuple[Host, ...]:
    return select(HOSTS, text, None)


def exclude(text: str) -> tuple[Host, ...]:
    return select(HOSTS, None, text)


@pytest.mark.parametrize(
    ("parse", "text", "error"),
    [
        (expand_one, "n[1-", 'expected "node[01-03,07]", found "n[1-" with an unmatched bracket: close it'),
        (expand_one, "n1]", 'found "n1]" with an unmatched bracket'),
        (expand_one, "n[3-1]", 'the range "3-1" in "n[3-1]" ends before it starts: swap its ends'),
        (expand_one, "n[a-b]", 'expected numbers and ranges like "0-3,7", found "a-b" in "n[a-b]"'),
        (expand_one, "n[]", 'expected numbers and ranges like "0-3,7", found "" in "n[]"'),
        (expand_one, "n[0-99999999]", 'the range "0-99999999" in "n[0-99999999]" has more than 65536 numbers: check'),
        (expand_one, "n[0-999][0-999]", '"n[0-999][0-999]" is 1000000 hosts, more than the limit of 65536'),
        (expand_one, "-oProxyCommand=x", 'expected a host name, found "-oProxyCommand=x"'),
        (expand_one, "a;b", 'expected a host name, found "a;b". Use letters, digits, ".", "-" and "_"'),
        (hostfile, "a\nb slot=8", 'hosts.txt, line 2: expected "slots=N" or "max_slots=M" after the host, found "slot'),
        (hostfile, "b slot=8", 'found "slot=8": did you'),
        (hostfile, "a 8", 'found "8": write "node1 slots=8"'),
        (hostfile, "a slots=0", 'expected a number of slots of at least 1, found "0" in "slots=0": write "node1 slots'),
        (hostfile, "a slots=x", 'found "x" in "slots=x"'),
        (hostfile, "a:", 'expected a number of slots after ":" in "a:"'),
        (hostfile, "a slots=1 slots=2", '"slots" appears twice: remove either'),
        (hostfile, "a:4 slots=4", '"a:4" and "slots=4" both set slots: remove either'),
        (hostfile, "a max_slots=4", '"max_slots" needs "slots"'),
        (hostfile, "a slots=4 max_slots=2", "slots=4 is more than max_slots=2: lower slots"),
        (
            hostfile,
            "# x\na slots=8\n\na slots=8",
            'line 4: host "a" is also in line 2: write a single line with the sum',
        ),
        (hostfile, "n[1-2]\nn2", 'line 2: host "n2" is also in line 1'),
        (hostfile, "n[2-1] slots=1", 'hosts.txt, line 1: the range "2-1" in "n[2-1]" ends before it starts'),
        (hostfile, "\n# nothing\n", "hosts.txt has no host: write a line for each, like node1 slots=8"),
        (hosts_option, "a:x", '--hosts a:x: expected a number of slots of at least 1, found "x" in "a:x"'),
        (hosts_option, "a:4,b,a:2", '--hosts a:4,b,a:2: host "a" appears twice: name it once, with all its slots'),
        (hosts_option, ",", '--hosts has no host: expected a list like "node1:8,node2:8"'),
        (hosts_option, "a b", '--hosts a b: expected a host name, found "a b"'),
        (include, "v1", '--include v1: no host "v1": did you mean "w1"?'),
        (exclude, "zzz", '--exclude zzz: no host "zzz": choose from w0, w1, w2'),
        (include, "w0:7", '--include w0:7: host "w0" has no slot 7. Its slots are 0, 1, 2, 3'),
        (include, "w0:1,1", '"w0:1,1" has a slot twice: name it once'),
        (include, "w0:0@w0:1", 'host "w0" appears twice: write all its slots together'),
        (include, "w0:x", 'expected numbers and ranges like "0-3,7", found "x" in "x"'),
        (include, "@", '--include has no host: expected a list like "node1@node2:0,2"'),
        (exclude, "w[0-2]", "--exclude w[0-2] leaves no host"),
    ],
)
def test_what_is_no_list_is_explained(parse: Callable[[str], Any], text: str, error: str) -> None:
    assert error in refusal(parse, text, kind=LaunchError)


def test_filters_that_leave_no_host_are_explained() -> None:
    text = refusal(select, HOSTS, "w0", "w0", kind=LaunchError)
    assert "--include w0 and --exclude w0 leaves no host of w0, w1, w2" in text


def test_a_hostfile_is_read_or_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    absent = refusal(read_hostfile, path, kind=LaunchError)
    path.write_bytes(b"\xff\xfe")
    for text, reason in (
        (absent, "No such file or directory"),
        (refusal(read_hostfile, path, kind=LaunchError), "invalid start byte"),
    ):
        assert f"cannot read the hostfile {path}: " in text and reason in text and text.endswith("Check --hostfile")
    path.write_text("a slots=2\n")
    assert read_hostfile(path) == (host("a", 2),)
