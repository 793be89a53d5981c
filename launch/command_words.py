"""The words of a command line, before tyro parses them."""

from __future__ import annotations

from collections.abc import Container, Sequence


def split_passthrough(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first --, and those after it, which another program parses."""
    if "--" not in argv:
        return list(argv), []
    end = argv.index("--")
    return list(argv[:end]), list(argv[end + 1 :])


def flag_value(words: Sequence[str], flag: str) -> str:
    """The value of the first `flag` among the words, given as `FLAG VALUE` or `FLAG=VALUE`; "" without one."""
    for index, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
        if word == flag and index + 1 < len(words):
            return words[index + 1]
    return ""


def empty_flag(words: Sequence[str]) -> str:
    """The first flag of the command whose value is the empty string, as an unset variable of a shell gives it.

    Settings, which have a dot in their names, may be empty. "" if there is no such flag.
    """
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name == "--" or "." in name:
            continue
        if equals and not value:
            return name
        if not equals and words[index + 1 : index + 2] == [""]:
            return name
    return ""


def with_joined_repeats(words: Sequence[str], list_flags: Container[str]) -> list[str]:
    """The words with all values of a repeated flag after its first occurrence, if it is one of `list_flags`.

    The parser would keep the last values alone. Raises ValueError if another flag is repeated.
    """
    before_first_flag: list[str] = []
    words_of: dict[str, list[str]] = {}  # a flag with the words that follow it, in the order of first occurrences
    current = before_first_flag
    for word in words:
        if not word.startswith("--"):
            current.append(word)
            continue
        written, equals, value = word.partition("=")
        flag = "--" + written[2:].replace("-", "_")
        if flag not in words_of:
            current = words_of[flag] = [word]
            continue
        if flag not in list_flags:
            raise ValueError(f"{written} is given twice: give it once")
        current = words_of[flag]
        if equals:
            current.append(value)
    return before_first_flag + [word for part in words_of.values() for word in part]
