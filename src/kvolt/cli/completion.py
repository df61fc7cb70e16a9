"""`kvolt completion`: print a completion script for bash, zsh or fish.

The script is generated from the parsers of all verbs and holds the words that they accept, so that completion starts no
process.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvolt.cli.flags import RecordOverride
from kvolt.cli.main import VERBS, verb_parser
from kvolt.engines.registry import engine_names
from kvolt.frontend.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from kvolt.kv.tiers.eviction import EVICTIONS
from kvolt.latency.presets import PRESETS
from kvolt.router.registry import ROUTERS
from kvolt.twin.objectives import OBJECTIVES

HELP = """
Print a completion script of verbs, flags and their values.

For this shell only:
  bash  source <(kvolt completion bash)
  zsh   source <(kvolt completion zsh)                     (after compinit)
  fish  kvolt completion fish | source
For all shells, once, and again after an update of kvolt:
  bash  kvolt completion bash > ~/.kvolt.bash && echo 'source ~/.kvolt.bash' >> ~/.bashrc
  zsh   kvolt completion zsh > ~/.kvolt.zsh && echo 'source ~/.kvolt.zsh' >> ~/.zshrc      (after compinit)
  fish  kvolt completion fish > ~/.config/fish/completions/kvolt.fish
"""

_MAX_DESCRIPTION = 70
_PLAIN_WORD = re.compile(r"[\w.-]+", re.ASCII)
"""Names of plugins that are offered: shells expand the words of a completion, `$(command)` too."""


@dataclass(slots=True)
class CommandWords:
    """Words that can follow a verb or sub-verb, with their descriptions."""

    verbs: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Known values of the flags that take one. Where none are known, shells complete file names."""
    takes_argument: bool = False
    """Whether it takes an argument, such as a file, beside the verbs."""


_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "--engine": engine_names,
    "--kv-eviction": lambda: EVICTIONS,
    "--objective": lambda: OBJECTIVES,
    "--preset": lambda: PRESETS,
    "--reasoning-parser": lambda: REASONING_PARSERS,
    "--router": lambda: ROUTERS,
    "--tool-parser": lambda: TOOL_PARSERS,
}
"""Known names of values, by flag; the flags may accept others, such as a file."""

Commands = dict[str, CommandWords]
"""By the words before; "" is `kvolt` itself."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="Shell that runs the script.")
    parser.set_defaults(without_config=_print_script)


def _print_script(args: argparse.Namespace) -> int:
    print("\n".join(SCRIPTS[args.shell](list_commands())))
    return 0


def list_commands() -> Commands:
    root = CommandWords({name: verb.help for name, verb in VERBS.items()}, {"--help": "", "--version": ""})
    commands = {"": root}
    for name, verb in VERBS.items():
        commands.update(_commands_of(name, verb_parser([name])[1]))
        for sub_verb, _ in verb.sub_modules:
            _, parser, _ = verb_parser([name, sub_verb])
            commands[name].verbs[sub_verb] = _first_sentence(parser.description or "")
            commands.update(_commands_of(f"{name} {sub_verb}", parser))
    return commands


def _commands_of(name: str, parser: argparse.ArgumentParser) -> Commands:
    """The command of a parser, and those of its sub-parsers."""
    command = CommandWords()
    commands = {name: command}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            for sub_verb, sub_parser in action.choices.items():
                command.verbs[sub_verb] = helps.get(sub_verb, "")
                commands.update(_commands_of(f"{name} {sub_verb}", sub_parser))
        elif not action.option_strings:
            command.verbs.update(dict.fromkeys(map(str, action.choices or ()), ""))
            command.takes_argument = command.takes_argument or not action.choices
        elif (
            action.help != argparse.SUPPRESS
            or isinstance(action, RecordOverride)  # not listed in this help, but usable
            or "--help" in action.option_strings
        ):
            flag = action.option_strings[-1]
            is_help = action.help in (None, argparse.SUPPRESS)
            command.flags[flag] = "" if is_help else _first_sentence(str(action.help))
            if action.nargs != 0:
                command.values[flag] = _values_of(action)
    return commands


def _values_of(action: argparse.Action) -> tuple[str, ...]:
    names = _NAMES.get(action.option_strings[-1])
    if names is not None:
        return tuple(name for name in names() if _PLAIN_WORD.fullmatch(name))
    if isinstance(action, RecordOverride):
        return action.known_values
    return tuple(map(str, action.choices or ()))


def _first_sentence(text: str) -> str:
    sentence = " ".join(text.replace("%%", "%").split()).partition(". ")[0].removesuffix(".")
    return sentence if len(sentence) <= _MAX_DESCRIPTION else f"{sentence[: _MAX_DESCRIPTION - 1].rstrip()}…"


def _flags_by_values(commands: Commands) -> dict[tuple[str, ...], list[str]]:
    """`COMMAND FLAG` of all flags with a value, by their known values."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for name, command in commands.items():
        for flag, values in command.values.items():
            grouped.setdefault(values, []).append(f"{name} {flag}")
    return grouped


def _pattern(texts: Sequence[str]) -> str:
    return "|".join(f'"{text}"' for text in texts)


def _known_commands(commands: Commands) -> str:
    return _pattern([name for name in commands if name])


def _bash(commands: Commands) -> Iterator[str]:
    yield """_kvolt() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} command= words= index
    # bash splits --flag=value into three words.
    if [[ $current == "=" ]]; then
        current=
    elif [[ $previous == "=" ]]; then
        previous=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    for ((index = 1; index < COMP_CWORD; index++)); do
        case "${command:+$command }${COMP_WORDS[index]}" in"""
    yield f'        {_known_commands(commands)}) command="${{command:+$command }}${{COMP_WORDS[index]}}" ;;'
    yield '        esac\n    done\n    case "$command $previous" in'
    for values, flags in _flags_by_values(commands).items():
        yield f"    {_pattern(flags)}) words={shlex.quote(' '.join(values))} ;;"
    yield '    *)\n        case "$command" in'
    for name, command in commands.items():
        yield f'        "{name}") words={shlex.quote(" ".join([*command.verbs, *command.flags]))} ;;'
    yield """        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]]; then compopt -o nospace; fi
}
complete -o default -F _kvolt kvolt"""


def _zsh(commands: Commands) -> Iterator[str]:
    yield """_kvolt() {
    local previous=${words[CURRENT - 1]} command= index
    local -a choices
    if [[ ${words[CURRENT]} == --*=* ]]; then
        previous=${words[CURRENT]%%=*}
        compset -P '*='
    fi
    for ((index = 2; index < CURRENT; index++)); do
        case "${command:+$command }${words[index]}" in"""
    yield f'        ({_known_commands(commands)}) command="${{command:+$command }}${{words[index]}}" ;;'
    yield '        esac\n    done\n    case "$command $previous" in'
    for values, flags in _flags_by_values(commands).items():
        no_space = "-S '' " if values and all(each.endswith("=") for each in values) else ""
        offer = f"compadd {no_space}-- {shlex.join(values)}" if values else "_files"
        yield f"    ({_pattern(flags)}) {offer}; return ;;"
    yield '    esac\n    case "$command" in'
    for name, command in commands.items():
        described = {**command.verbs, **command.flags}
        pairs = [f"{word}:{text.replace(':', ' -')}" if text else word for word, text in described.items()]
        yield f'    ("{name}") choices=({shlex.join(pairs)}) ;;'
    yield """    esac
    _describe kvolt choices || _files
}
compdef _kvolt kvolt"""


def _fish(commands: Commands) -> Iterator[str]:
    yield f"set -g __kvolt_commands {shlex.join(name for name in commands if name)}"
    yield """function __kvolt_at
    set -l command
    for word in (commandline -opc)[2..]
        if contains -- (string join -- ' ' $command $word) $__kvolt_commands
            set -a command $word
        end
    end
    test "$command" = "$argv"
end"""
    for name, command in commands.items():
        at = f"complete -c kvolt -n '__kvolt_at {name}'"
        no_files = "" if command.takes_argument else " -f"
        for word, text in command.verbs.items():
            yield f"{at}{no_files} -a {word} -d {_fish_quote(text)}"
        for flag, text in command.flags.items():
            values = command.values.get(flag)
            takes = "" if values is None else f" -x -a {_fish_quote(' '.join(values))}" if values else " -r"
            yield f"{at} -l {flag.removeprefix('--')}{takes} -d {_fish_quote(text)}"


def _fish_quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS: dict[str, Callable[[Commands], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
