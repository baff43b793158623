"""Hostfiles, --hosts, --include and --exclude: what they mean, and what they say about mistakes."""

from pathlib import Path

import pytest

from lowtide.launch.hosts.host import Host, LaunchError
from lowtide.launch.hosts.names import parse_hostfile, parse_hosts, read_hostfile, select


def host(name: str, count: int | None = None) -> Host:
    return Host(name, None if count is None else tuple(range(count)))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("worker-1 slots=4\nworker-2 slots=4\n", [host("worker-1", 4), host("worker-2", 4)]),
        ("# all\n\n  node1 slots=2  # the first\n#node2 slots=2\nnode3#x\n", [host("node1", 2), host("node3")]),
        ("aa slots=2 max_slots=4\nbb max-slots=3 slots=3", [host("aa", 2), host("bb", 3)]),
        ("node1:8\nnode2", [host("node1", 8), host("node2")]),
        ("node[01-02,07] slots=8", [host("node01", 8), host("node02", 8), host("node07", 8)]),
        ("node[1-2]:2", [host("node1", 2), host("node2", 2)]),
        ("a slots = 2\r\nb\tSLOTS=1\r\n", [host("a", 2), host("b", 1)]),
        ("fe80::1 slots=1\nroot@10.0.0.2:2", [host("fe80::1", 1), host("root@10.0.0.2", 2)]),
    ],
)
def test_a_hostfile_has_the_syntax_of_deepspeed_and_of_mpi(text: str, hosts: list[Host]) -> None:
    assert list(parse_hostfile(text, "hosts.txt")) == hosts


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "a\nb slot=8",
            'hosts.txt, line 2: expected "slots=N" or "max_slots=M" after the host, found "slot=8": did you',
        ),
        ("a 8", 'found "8": write "node1 slots=8"'),
        ("a slots=0", 'expected a number of slots of at least 1, found "0" in "slots=0": write "node1 slots=8"'),
        ("a slots=-1", 'found "-1" in "slots=-1"'),
        ("a slots=x", 'found "x" in "slots=x"'),
        ("a slots=", 'found "" in "slots="'),
        ("a:", 'expected a number of slots after ":" in "a:"'),
        ("a slots=1 slots=2", '"slots" appears twice: remove either'),
        ("a:4 slots=4", '"a:4" and "slots=4" both set slots: remove either'),
        ("a max_slots=4", '"max_slots" needs "slots"'),
        ("a slots=4 max_slots=2", "slots=4 is more than max_slots=2: lower slots"),
        ("# x\na slots=8\n\na slots=8", 'line 4: host "a" is also in line 2: write a single line with the sum'),
        ("n[1-2]\nn2", 'line 2: host "n2" is also in line 1'),
        ("n[2-1] slots=1", 'hosts.txt, line 1: the range "2-1" in "n[2-1]" ends before it starts'),
        ("\n# nothing\n", "hosts.txt has no host: write a line for each, like node1 slots=8"),
    ],
)
def test_a_mistake_in_a_hostfile_is_named_with_its_line(text: str, error: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hostfile(text, "hosts.txt")
    assert error in str(caught.value)


def test_a_hostfile_is_read(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n")
    assert read_hostfile(tmp_path / "hosts") == (host("a", 2),)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file or directory"), (b"\xff\xfe", "invalid start byte")]
)
def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LaunchError) as caught:
        read_hostfile(path)
    assert f"cannot read the hostfile {path}: " in str(caught.value) and reason in str(caught.value)
    assert str(caught.value).endswith("Check --hostfile")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:8,b:8", [host("a", 8), host("b", 8)]),
        ("node[1-3]:4", [host("node1", 4), host("node2", 4), host("node3", 4)]),
        ("n[1,3],login:1", [host("n1"), host("n3"), host("login", 1)]),
        ("localhost", [host("localhost")]),
    ],
)
def test_hosts_are_named_on_the_command_line(text: str, hosts: list[Host]) -> None:
    assert list(parse_hosts(text)) == hosts


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a:x", '--hosts a:x: expected a number of slots of at least 1, found "x" in "a:x"'),
        ("a:4,b,a:2", '--hosts a:4,b,a:2: host "a" appears twice: name it once, with all its slots'),
        (",", '--hosts has no host: expected a list like "node1:8,node2:8"'),
        ("a b", '--hosts a b: expected a host name, found "a b"'),
    ],
)
def test_a_mistake_in_hosts_is_explained(text: str, error: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hosts(text)
    assert error in str(caught.value)


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


@pytest.mark.parametrize(
    ("include", "exclude", "error"),
    [
        ("v1", None, '--include v1: no host "v1": did you mean "w1"?'),
        (None, "zzz", '--exclude zzz: no host "zzz": there are w0, w1, w2'),
        ("w0:7", None, '--include w0:7: host "w0" has no slot 7. Its slots are 0, 1, 2, 3'),
        ("w0:1,1", None, '"w0:1,1" has a slot twice: name it once'),
        ("w0:0@w0:1", None, 'host "w0" appears twice: write all its slots together'),
        ("w0:x", None, 'expected numbers and ranges like "0-3,7", found "x" in "x"'),
        ("@", None, '--include has no host: expected a list like "node1@node2:0,2"'),
        ("w0", "w0", "--include w0 and --exclude w0 leaves no host of w0, w1, w2"),
        (None, "w[0-2]", "--exclude w[0-2] leaves no host"),
    ],
)
def test_a_mistake_in_a_filter_is_explained(include: str | None, exclude: str | None, error: str) -> None:
    with pytest.raises(LaunchError) as caught:
        select(HOSTS, include, exclude)
    assert error in str(caught.value)
