"""`lowtide completion`: a script for the shell, so that TAB completes commands, options and their values."""

import argparse
import shlex
from collections.abc import Iterable, Sequence

from .arguments import Parser
from .command_tree import Command, Option, command_tree

HELP = "print a script with which the shell completes commands and options"
_EPILOG = """examples:
  lowtide completion bash > ~/.local/share/bash-completion/completions/lowtide
  lowtide completion zsh > ~/.zfunc/_lowtide        with fpath=(~/.zfunc $fpath) before compinit in ~/.zshrc
  lowtide completion fish > ~/.config/fish/completions/lowtide.fish

The script is made from the parsers of the commands: make it again after an update.
"""


def main(argv: Sequence[str]) -> int:
    """Prints the script."""
    from .main import COMMANDS  # which imports this module by name, as every command

    arguments = parser().parse_args(argv)
    print({"bash": bash, "zsh": zsh, "fish": fish}[arguments.shell](command_tree(COMMANDS)), end="")
    return 0


def parser() -> Parser:
    """The command line of `lowtide completion`."""
    result = Parser(
        prog="lowtide completion",
        description=HELP[0].upper() + HELP[1:] + ".",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    return result


def bash(root: Command) -> str:
    """A script for bash 4 or newer. It walks the words to find the command, as argparse does."""
    words, values = [], []
    for command in root.every():
        offered = [part.path[-1] for part in command.commands] or list(command.choices)
        flags = [name for option in command.options for name in option.names]
        sets = f"words={_quoted(' '.join(offered))} flags={_quoted(' '.join(flags))}"
        files = " files=1" if command.takes_files else ""
        words.append(f"        {_quoted(command.place)}) {sets}{files} ;;")
        for option in command.options:
            if option.takes_value and (option.choices or option.is_file):
                action = "files=1" if option.is_file else f"words={_quoted(' '.join(option.choices))}"
                values.append(f"        {_patterns(command, option)}) {action} ;;")
    return _BASH.format(
        paths=_alternatives(part.place for part in root.every() if part.path),
        valued=_alternatives(root.places_of_values()),
        ending=_alternatives(part.place for part in root.every() if part.ends_options),
        words="\n".join(words),
        values="\n".join(values),
    )


def fish(root: Command) -> str:
    """A script for fish 3 or newer; the same walk as in `bash`."""
    lines = []
    for command in root.every():
        when = f"-n {_quoted(f'test (__lowtide_place) = {_fish_word(command.place)}')}"
        lines += [f"complete -c lowtide {when} -a {c.path[-1]} -d {_fish_word(c.help)}" for c in command.commands]
        lines += [f"complete -c lowtide {when} -a {_fish_word(' '.join(command.choices))}"] * bool(command.choices)
        lines += [f"complete -c lowtide {when} -F"] * command.takes_files
        for option in command.options:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
            value = (" -r -F" if option.is_file else " -x") if option.takes_value else ""
            value += f" -a {_fish_word(' '.join(option.choices))}" if option.choices else ""
            lines += [f"complete -c lowtide {when} {names}{value} -d {_fish_word(option.help)}"]
    lines.append("complete -c lowtide -n 'test (__lowtide_place) = rest' -F")
    return _FISH.format(
        paths=" ".join(_fish_word(part.place) for part in root.every() if part.path),
        valued=" ".join(map(_fish_word, root.places_of_values())),
        ending=" ".join(_fish_word(part.place) for part in root.every() if part.ends_options),
        lines="\n".join(lines),
    )


def zsh(root: Command) -> str:
    """A script for zsh's completion system: a function for each command, with `_arguments`."""
    return "#compdef lowtide\n\n" + "\n\n".join(map(_zsh_function, root.every())) + '\n\n_lowtide "$@"\n'


def _zsh_function(command: Command) -> str:
    name = "_".join(("_lowtide", *command.path))
    specs = [_zsh_option(option) for option in command.options]
    after = ""
    if command.commands:
        specs += ["'1: :->command'", "'*:: :->rest'"]
        described = " ".join(_quoted(f"{_zsh_text(part.path[-1])}:{part.help}") for part in command.commands)
        cases = " ".join(f"{part.path[-1]}) {name}_{part.path[-1]} ;;" for part in command.commands)
        after = (
            f"\n    case $state in\n        command) commands=({described}); _describe command commands ;;\n"
            f"        rest) case $line[1] in {cases} esac ;;\n    esac"
        )
    elif command.choices:
        specs.append(_quoted(f"1: :({' '.join(command.choices)})"))
    elif command.takes_files:
        specs.append("'*: :_files'")
    ends = " -A '-*'" if command.ends_options else ""
    joined = " \\\n        ".join(specs)
    head = "    local curcontext=$curcontext state line\n    local -a commands\n    typeset -A opt_args\n"
    return f"{name}() {{\n{head}    _arguments -C -s{ends} \\\n        {joined}{after}\n}}"


def _zsh_option(option: Option) -> str:
    values = f"({' '.join(option.choices)})" if option.choices else "_files" if option.is_file else " "
    tail = _quoted(f"[{_zsh_text(option.help)}]" + (f": :{values}" if option.takes_value else ""))
    names = [name + ("=" if option.takes_value and name.startswith("--") else "") for name in option.names]
    if len(names) == 1:
        return f"{_quoted('*') if option.is_repeatable else ''}{names[0]}{tail}"
    return f"'({' '.join(option.names)})'{{{','.join(names)}}}{tail}"


def _zsh_text(text: str) -> str:
    for letter in "\\[]:":
        text = text.replace(letter, f"\\{letter}")
    return text


def _quoted(text: str) -> str:
    return shlex.quote(text)


def _fish_word(text: str) -> str:
    """Fish takes \\' and \\\\ inside of single quotes, and nothing else."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _patterns(command: Command, option: Option) -> str:
    return "|".join(_quoted(f"{command.place} {name}") for name in option.names)


def _alternatives(texts: Iterable[str]) -> str:
    return "|".join(map(_quoted, texts))


_BASH = """# bash completion for lowtide
_lowtide() {{
    local place=lowtide value= rest= files= words= flags= word i
    local current=${{COMP_WORDS[COMP_CWORD]}}
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        if [[ -n $value ]]; then
            [[ $word == = ]] || value=
            continue
        fi
        case "$place $word" in
            {paths}) place="$place $word" ;;
            {valued}) value=$word ;;
            *' --') rest=1; break ;;
            *' '-*|*' =') ;;
            *) case $place in {ending}) rest=1; break ;; esac ;;
        esac
    done
    [[ $current == = ]] && current=
    if [[ -n $rest ]]; then
        files=1
    elif [[ -n $value ]]; then
        case "$place $value" in
{values}
        esac
    else
        case $place in
{words}
        esac
        [[ $current == -* ]] && words=$flags files=
    fi
    COMPREPLY=()
    [[ -n $words ]] && mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    if [[ -n $files ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -f -- "$current")
    fi
}}
complete -F _lowtide lowtide
"""

_FISH = """# fish completion for lowtide
function __lowtide_place
    set -l place lowtide
    set -l value
    for word in (commandline -opc)[2..-1]
        if test -n "$value"
            set value
            continue
        end
        if contains -- "$place $word" {paths}
            set place "$place $word"
        else if contains -- "$place $word" {valued}
            set value $word
        else if test "$word" = --
            set place rest
            break
        else if not string match -q -- '-*' $word; and contains -- $place {ending}
            set place rest
            break
        end
    end
    echo $place
end

complete -c lowtide -f
{lines}
"""
