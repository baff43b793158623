"""Every command says what was meant by an option that does not exist."""

from importlib import import_module

import pytest

from lowtide.bin.arguments import Parser
from lowtide.bin.main import COMMANDS


def error_of(parser: Parser, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(arguments)
    assert caught.value.code == 2
    error, place = capsys.readouterr().err.splitlines()
    assert place == f"see `{error.split(': error: ')[0]} --help`"
    return error


@pytest.fixture
def parser() -> Parser:
    result = Parser(prog="tide")
    result.add_argument("--level", required=True)
    result.add_argument("-v", "--verbose", action="store_true")
    result.add_argument("--unit", choices=("metre", "foot"))
    actions = result.add_subparsers(metavar="ACTION")
    actions.add_parser("measure").add_argument("--station", type=int)
    actions.add_parser("predict")
    return result


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--level", "1", "--verbos2"], 'tide: error: unknown option "--verbos2"; did you mean "--verbose"?'),
        (["--level", "1", "--xyz=4"], 'tide: error: unknown option "--xyz"'),
        (["--levle", "1"], 'tide: error: unknown option "--levle"; did you mean "--level"?'),
        (["--verbose"], "tide: error: the following arguments are required: --level"),
        (["--level", "1", "mesure", "--statoin"], 'tide: error: unknown ACTION "mesure"; did you mean "measure"?'),
        (["--level", "1", "--unit", "fot"], 'tide: error: unknown --unit "fot"; did you mean "foot"?'),
        (["--level", "1", "--unit", "xyz"], 'tide: error: unknown --unit "xyz"; expected one of metre, foot'),
        (["--level", "1", "mesure"], 'tide: error: unknown ACTION "mesure"; did you mean "measure"?'),
        (
            ["--level", "1", "measure", "--statoin", "4"],
            'tide measure: error: unknown option "--statoin"; did you mean "--station"?',
        ),
        (["--level", "1", "measure", "more"], 'tide measure: error: expected nothing more, found "more"'),
    ],
)
def test_a_slip_is_named(parser: Parser, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(parser, arguments, capsys) == text


def test_what_stands_behind_two_dashes_is_no_slip(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tide")
    parser.add_argument("--level", required=True)
    parser.add_argument("words", nargs="*")
    assert error_of(parser, ["--", "--levle"], capsys) == ("tide: error: the following arguments are required: --level")


def test_what_is_right_is_parsed_as_ever(parser: Parser) -> None:
    options = parser.parse_args(["--lev", "-1", "--unit=foot", "measure", "--station", "-3"])
    assert (options.level, options.unit, options.station) == ("-1", "foot", -3)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_such_a_parser(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = import_module(f"lowtide.bin.{name}").parser()
    assert isinstance(command, Parser) and command.prog == f"lowtide {name}"
    assert 'unknown option "--hlep"; did you mean "--help"?' in error_of(command, ["--hlep"], capsys)
