"""`lowtide plan`: the table of the ZeRO paper on the command line."""

import pytest

from lowtide.bin.main import main as lowtide_main
from lowtide.bin.plan import main


def rows(text: str) -> dict[str, list[str]]:
    """The numbers of each row by its first cell."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    return {first: rest for first, *rest in cells}


def test_the_command_prints_the_table_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert lowtide_main(["plan", "--params", "7.5e9", "--ranks", "1,4,16,64,256,1024"]) == 0
    out = capsys.readouterr().out
    assert "7.5 billion parameters, Adam, mixed precision: GB per rank" in out
    assert rows(out) == {
        "1": ["120", "120", "120", "120"],
        "4": ["120", "52.5", "41.2", "30"],
        "16": ["120", "35.6", "21.6", "7.5"],
        "64": ["120", "31.4", "16.6", "1.88"],
        "256": ["120", "30.4", "15.4", "0.469"],
        "1024": ["120", "30.1", "15.1", "0.117"],
    }


def test_several_sizes_give_several_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--params", "128e9,1e12", "--ranks", "64"]) == 0
    out = capsys.readouterr().out
    assert out.count("64 │") == 2 and "128 billion" in out and "1,000 billion" in out
    assert rows(out)["64"] == ["16000", "4188", "2219", "250"]


def test_fp32_has_no_separate_master_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--params", "1e9", "--ranks", "2", "--fp32"]) == 0
    assert rows(capsys.readouterr().out)["2"] == ["16", "12", "10", "8"]


@pytest.mark.parametrize(
    ("text", "title"),
    [("7b", "7 billion"), ("1.5B", "1.5 billion"), ("350M", "0.35 billion"), ("13e9", "13 billion"), ("1T", "1,000 b")],
)
def test_a_size_is_read_as_people_write_it(text: str, title: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--params", text, "--ranks", "1"]) == 0
    assert f"  {title}" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["many", "7 billion", "7bb", "1.5", "0", "-7b", "inf", "nan", "1e999", "7b,", "9k,7x"])
def test_a_size_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--params={text}"])
    assert capsys.readouterr().err == (
        "lowtide plan: error: argument --params: expected numbers of parameters with commas between, for example "
        f'7b,1.5B,350M,13e9, found "{text}"\nsee `lowtide plan --help`\n'
    )


def test_numbers_of_ranks_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--params", "1e9", "--ranks", "2,0"])
    assert 'expected a whole number of at least 1, found "0"' in capsys.readouterr().err
