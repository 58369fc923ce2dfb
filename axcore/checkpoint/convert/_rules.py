"""Which foreign tensors hold which of our parameters."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from axcore.checkpoint.convert._source import TensorInfo
from axcore.checkpoint.convert._transforms import Identity, Transform
from axcore.errors import CheckpointError, did_you_mean

__all__ = [
    "Application",
    "FormerSuffix",
    "Ignored",
    "Matching",
    "OptionalPrefix",
    "Rule",
    "TensorRule",
    "Tied",
    "match_tensors",
]

Names = str | tuple[str, ...]
_PLACEHOLDER = re.compile(r"\{([a-z]\w*)\}")
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """Foreign tensors that hold parameters of ours.

    Names may have placeholders such as ``{i}``, which stand for a number: the same one on both
    sides. A placeholder of ``foreign`` alone counts along the first dim of our parameter
    (:class:`~axcore.checkpoint.convert.Stacked`). A rule that fits no parameter of the model does
    nothing.

    Attributes:
        foreign: Foreign name or names, such as ``"layers.{i}.q_proj.weight"``.
        path: Our parameter path or paths, per layer (``"decoder/layer/{i}/attention/qkv/..."``).
        transform: How the arrays correspond.
        default: Value to fill our parameters with where no foreign tensor is there; None: that is
            an error.
    """

    foreign: Names
    path: Names
    transform: Transform = dataclasses.field(default_factory=Identity)
    default: float | None = None


@dataclasses.dataclass(frozen=True)
class Tied:
    """A foreign tensor that repeats another one: checked to be equal, then left out.

    Attributes:
        foreign: Its name, such as ``"lm_head.weight"``.
        same_as: The tensor that holds the same values.
    """

    foreign: str
    same_as: str


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Foreign tensors that are not read: constants that some versions of a file hold, or a part
    that the family does not have.

    Attributes:
        foreign: Name; placeholders stand for numbers, and ``*`` at the end for any text.
        reason: Why nothing is lost, for the report.
    """

    foreign: str
    reason: str


@dataclasses.dataclass(frozen=True)
class OptionalPrefix:
    """A prefix of the other rules' foreign names that some files leave out of every name.

    On import it is left out where no tensor of the source has it; on export it is written.

    Attributes:
        prefix: The prefix, such as ``"transformer."``.
    """

    prefix: str


@dataclasses.dataclass(frozen=True)
class FormerSuffix:
    """An end of the other rules' foreign names that old files write otherwise.

    On import the former one is taken where a tensor of the source has it; on export it is not
    written.

    Attributes:
        suffix: The end, such as ``"LayerNorm.weight"``.
        former: How old files write it, such as ``"LayerNorm.gamma"``.
    """

    suffix: str
    former: str


Rule = TensorRule | Tied | Ignored | OptionalPrefix | FormerSuffix


@dataclasses.dataclass(frozen=True)
class Application:
    """A rule with its numbers filled in.

    Attributes:
        foreign: Foreign names; empty when our parameters are filled with the rule's default.
        paths: Our parameters.
        shapes: Their shapes.
        rule: The rule.
    """

    foreign: tuple[str, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rule: TensorRule

    @property
    def transform(self) -> Transform:
        """How the arrays correspond."""
        return self.rule.transform


@dataclasses.dataclass(frozen=True)
class Matching:
    """How a source and a model correspond.

    Attributes:
        applications: What to do, in the order of the rules.
        tied: Foreign name -> the one that it repeats.
        ignored: Foreign name -> why it is no parameter.
        unused: Foreign tensors that nothing takes, and that were allowed.
        unmapped: Parameters that the source does not hold, and that were allowed.
    """

    applications: tuple[Application, ...]
    tied: Mapping[str, str]
    ignored: Mapping[str, str]
    unused: tuple[str, ...]
    unmapped: tuple[str, ...]


def applications(
    rules: Iterable[Rule], params: Mapping[str, tuple[int, ...]]
) -> tuple[Application, ...]:
    """Returns every rule with its numbers filled in.

    Args:
        rules: The family's rules.
        params: Shapes of our parameters by path, per layer.

    Raises:
        CheckpointError: Rules contradict each other or name half of a group (AX621).
    """
    found: list[Application] = []
    taken: dict[str, TensorRule] = {}
    for rule in rules:
        if not isinstance(rule, TensorRule):
            continue
        paths = _tuple(rule.path)
        pattern = _compiled(paths[0])
        for path in params:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            numbers = match.groupdict()
            group = tuple(_filled(p, numbers) for p in paths)
            for name in group:
                if name not in params:
                    raise _author(f"{name} is no parameter of the model, {path} is", rule)
                if name in taken:
                    raise _author(f"{name} is taken by {taken[name]} already", rule)
                taken[name] = rule
            shapes = tuple(params[name] for name in group)
            names = _foreign(rule, numbers, shapes[0])
            found.append(Application(names, group, shapes, rule))
    return tuple(found)


def match_tensors(
    rules: Sequence[Rule],
    params: Mapping[str, tuple[int, ...]],
    infos: Mapping[str, TensorInfo],
    *,
    allow: Sequence[str] = (),
    where: str = "",
) -> Matching:
    """Finds what each parameter is made of, from names and shapes alone.

    Args:
        rules: The family's rules.
        params: Shapes of our parameters by path, per layer.
        infos: Foreign tensors by name.
        allow: Patterns of foreign names and of our paths that may be left over.
        where: The source, for messages.

    Raises:
        CheckpointError: Tensors are left over on either side (AX615), or of another shape (AX616).
    """
    rules = _as_written(rules, infos)
    found: list[Application] = []
    absent: dict[str, tuple[str, ...]] = {}  # our path -> foreign names that are not there
    wrong: list[str] = []
    used: set[str] = set()
    for item in applications(rules, params):
        missing = tuple(name for name in item.foreign if name not in infos)
        if not missing:
            used.update(item.foreign)
            wrong += _shape_differences(item, infos)
            found.append(item)
        elif item.rule.default is not None and len(missing) == len(item.foreign):
            found.append(dataclasses.replace(item, foreign=()))
        else:
            used.update(name for name in item.foreign if name in infos)
            absent |= dict.fromkeys(item.paths, missing)
    made = {path for item in found for path in item.paths}
    absent |= {path: () for path in params if path not in made and path not in absent}
    tied, ignored = _left_out(rules, infos, used)
    left = [n for n in infos if n not in used and n not in tied and n not in ignored]
    _check_left_over(left, absent, infos, params, allow, where)
    if wrong:
        raise CheckpointError(
            _listed("of another shape than the config says", wrong),
            code="AX616",
            where=where,
            hint="the settings and the tensors are of different models, or the file is damaged",
        )
    return Matching(tuple(found), tied, ignored, tuple(left), tuple(absent))


def allowed(name: str, allow: Iterable[str]) -> bool:
    """Tells whether one of the patterns fits a name; ``*`` spans everything."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in allow)


def _as_written(rules: Sequence[Rule], infos: Mapping[str, TensorInfo]) -> Sequence[Rule]:
    """The rules, with foreign names as the source writes them."""
    for prefix in [rule.prefix for rule in rules if isinstance(rule, OptionalPrefix)]:
        if not any(name.startswith(prefix) for name in infos):
            rules = [_renamed(rule, lambda name, p=prefix: name.removeprefix(p)) for rule in rules]
    for old in [rule for rule in rules if isinstance(rule, FormerSuffix)]:
        if any(name.endswith(old.former) for name in infos):
            rules = [_renamed(rule, lambda name, old=old: _former(name, old)) for rule in rules]
    return rules


def _former(name: str, old: FormerSuffix) -> str:
    end = old.suffix
    return name.removesuffix(end) + old.former if name.endswith(end) else name


def _renamed(rule: Rule, rename: Callable[[str], str]) -> Rule:
    match rule:
        case TensorRule(foreign=str(name)):
            return dataclasses.replace(rule, foreign=rename(name))
        case TensorRule(foreign=names):
            return dataclasses.replace(rule, foreign=tuple(map(rename, names)))
        case Tied():
            return Tied(rename(rule.foreign), rename(rule.same_as))
        case Ignored():
            return dataclasses.replace(rule, foreign=rename(rule.foreign))
    return rule


def _left_out(
    rules: Iterable[Rule], infos: Mapping[str, TensorInfo], used: set[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Foreign tensors that repeat others, and those that are no parameters."""
    tied: dict[str, str] = {}
    ignored: dict[str, str] = {}
    for rule in rules:
        if isinstance(rule, TensorRule | OptionalPrefix | FormerSuffix):
            continue
        pattern = _compiled(rule.foreign)
        if isinstance(rule, Ignored) and rule.foreign.endswith("*"):
            pattern = re.compile(_compiled(rule.foreign[:-1]).pattern + ".*")
        for name in infos:
            match = pattern.fullmatch(name)
            if match is None or name in used:
                continue
            if isinstance(rule, Ignored):
                ignored[name] = rule.reason
                continue
            other = _filled(rule.same_as, match.groupdict())
            if other in used:
                tied[name] = other
    return tied, ignored


def _check_left_over(
    left: Sequence[str],
    absent: Mapping[str, tuple[str, ...]],
    infos: Mapping[str, TensorInfo],
    params: Mapping[str, tuple[int, ...]],
    allow: Sequence[str],
    where: str,
) -> None:
    unused = [name for name in left if not allowed(name, allow)]
    unmapped = [path for path in absent if not allowed(path, allow)]
    if not unused and not unmapped:
        return
    parts = []
    if unused:
        names = [f"{name} {list(infos[name].shape)}" for name in unused]
        parts.append(_listed("of the source that nothing uses", names))
    if unmapped:
        names = [
            f"{path} {list(params[path])}" + (f" (from {', '.join(names)})" if names else "")
            for path, names in ((path, absent[path]) for path in unmapped)
        ]
        parts.append(_listed("of the model that the source does not hold", names))
    name = (unused or unmapped)[0]
    guess = did_you_mean(unmapped[0], left) if unmapped and left else ""
    raise CheckpointError(
        "; and ".join(parts),
        code="AX615",
        where=where,
        hint=guess
        or f"if nothing is lost by it, --allow {name!r} goes on without (patterns work; "
        "parameters of ours keep their initial values)",
    )


def _shape_differences(item: Application, infos: Mapping[str, TensorInfo]) -> list[str]:
    expected = item.transform.foreign_shapes(item.shapes)
    if len(expected) != len(item.foreign):
        raise _author(f"{len(item.foreign)} foreign names for {len(expected)} arrays", item.rule)
    return [
        f"{name} has shape {list(infos[name].shape)}, expected {list(shape)}"
        for name, shape in zip(item.foreign, expected, strict=True)
        if infos[name].shape != shape
    ]


def _foreign(
    rule: TensorRule, numbers: Mapping[str, str], shape: tuple[int, ...]
) -> tuple[str, ...]:
    names = tuple(_filled(name, numbers) for name in _tuple(rule.foreign))
    free = list(dict.fromkeys(p for name in names for p in _PLACEHOLDER.findall(name)))
    if not free:
        return names
    count = next(iter(shape), 0)
    first, *others = names
    if len(free) > 1 or others or not count:
        raise _author(f"cannot count {', '.join(free)} along the first dim of {shape}", rule)
    return tuple(_filled(first, {free[0]: str(n)}) for n in range(count))


def _compiled(template: str) -> re.Pattern[str]:
    """A pattern of one name with ``{i}`` as a named group of digits."""
    text, seen, last = "", set(), 0
    for match in _PLACEHOLDER.finditer(template):
        name = match.group(1)
        text += re.escape(template[last : match.start()])
        text += f"(?P={name})" if name in seen else f"(?P<{name}>0|[1-9][0-9]*)"
        seen.add(name)
        last = match.end()
    return re.compile(text + re.escape(template[last:]))


def _filled(template: str, numbers: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda m: numbers.get(m.group(1), m.group(0)), template)


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _author(message: str, rule: TensorRule) -> CheckpointError:
    return CheckpointError(
        message, code="AX621", where=f"{rule}", hint="the converter's rules are wrong; report it"
    )


def _listed(what: str, names: Sequence[str]) -> str:
    count = f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}"
    more = len(names) - _SHOWN
    return f"{count}: {', '.join(names[:_SHOWN])}" + (f", and {more} more" if more > 0 else "")
