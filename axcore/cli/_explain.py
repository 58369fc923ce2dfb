"""Who set each value of a config, what rules did, and what follows for the modules it makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from axcore.config import Event

if TYPE_CHECKING:
    from axcore.config import Config
    from axcore.train import Assembled

__all__ = ["explained", "fields", "text"]

_BY_CODE = "the layer's own default"


def fields(cfg: Config) -> dict[str, dict[str, Any]]:
    """Returns path -> value, who set it, and all who did before, oldest first."""
    out: dict[str, dict[str, Any]] = {}
    for path, value in cfg.lines().items():
        if path:
            history = [event.to_json() for event in cfg.history(path)]
            out[path] = {"value": value, "set_by": history[-1], "history": history}
    return out


def explained(a: Assembled) -> dict[str, Any]:
    """Returns the JSON document of ``config explain``.

    Beside ``fields`` it holds ``instance``, ``rules`` (see ``RuleReport``), ``effective``: values
    that the config leaves open and the modules get, such as dtypes taken from the parent, with
    where each comes from; ``replacements``: what each replacement of a node did, lost edits
    included; and ``replicated``: parameters without logical axes, which every device holds whole.
    """
    from axcore.module import flatten_specs

    trainer = a.cfg.instantiate(name="trainer")
    specs = flatten_specs(trainer.model.parameter_specs())
    return {
        "instance": a.instance.name,
        "fields": fields(a.cfg),
        "rules": a.rules.to_json(),
        "effective": _effective(a.cfg, trainer),
        "replacements": _replacements(a.cfg),
        "replicated": [
            path for path, spec in specs.items() if not set(spec.axes) - {None, "layers"}
        ],
    }


def _replacements(cfg: Config) -> list[dict[str, Any]]:
    """Returns what replacements anywhere in a config did, oldest first at each node."""
    return [
        {
            "path": f"{path}.{done.path}" if path else done.path,
            "old": done.old,
            "new": done.new,
            "moved": list(done.moved),
            "defaulted": list(done.defaulted),
            "overridden": list(done.overridden),
            "lost": [
                {"path": e.path, "value": e.value, "set_by": str(e.event), "reason": e.reason}
                for e in done.lost
            ],
        }
        for path, node in cfg.walk()
        for done in node.replacements
    ]


def _effective(cfg: Any, trainer: Any) -> dict[str, dict[str, Any]]:
    """Returns path -> value and source where a built module has another value than the config."""
    written = cfg.lines()
    out: dict[str, dict[str, Any]] = {}
    for module in _modules(trainer):
        where = module.config_path
        for name in module.cfg.fields():
            _compare(module.cfg, name, where, written, out)
        # What nobody sets has a default in code; the module knows it.
        for name in module.inherited_fields:
            path = f"{where}.{name}" if where else name
            if path not in out and written.get(path) == "None":
                out[path] = {
                    "value": repr(getattr(module, name)),
                    "from": _BY_CODE,
                }
    for path, node in trainer.cfg.walk():
        for name in node.fields():
            _compare(node, name, path, written, out)
    return dict(sorted(out.items()))


def _compare(
    node: Any, name: str, where: str, written: Mapping[str, str], out: dict[str, dict[str, Any]]
) -> None:
    path = f"{where}.{name}" if where else name
    value = node.lines().get(name)
    if value is None or path in out or path not in written or written[path] == value:
        return
    out[path] = {"value": value, "from": str(node.set_by(name))}


def _modules(module: Any) -> Iterator[Any]:
    yield module
    for child in module.children.values():
        yield from _modules(child)


def text(data: Mapping[str, Any]) -> str:
    """Returns what people see of ``config explain``."""
    rules = data["rules"]
    lines = [f"instance {data['instance']}", "", "values:"]
    lines += [f"  {p}: {f['value']}  [{_who(f['set_by'])}]" for p, f in data["fields"].items()]
    effective = data["effective"]
    if effective:
        lines += ["", "what modules get where the config leaves it open:"]
        lines += [
            f"  {path}: {e['value']}  [{e['from']}]"
            for path, e in effective.items()
            if e["from"] != _BY_CODE
        ]
        # Nearly all layers have the same dtypes: say it once for each value.
        open_ones: dict[tuple[str, str], int] = {}
        for path, e in effective.items():
            if e["from"] == _BY_CODE:
                key = (path.rpartition(".")[2], e["value"])
                open_ones[key] = open_ones.get(key, 0) + 1
        lines += [
            f"  {name} of {count} modules: {value}  [{_BY_CODE}]"
            for (name, value), count in open_ones.items()
        ]
    if data["replacements"]:
        lines += ["", "replaced:"]
    for done in data["replacements"]:
        lines.append(f"  {done['path']}: {done['old']} -> {done['new']}")
        lines += [
            f"    {kind}: {', '.join(done[kind]) or 'none'}"
            for kind in ("moved", "defaulted", "overridden")
        ]
        lines += [
            f"    lost: {e['path']} = {e['value']} (set by {e['set_by']}): {e['reason']}"
            for e in done["lost"]
        ]
    lines += ["", "rules:"]
    for rule in rules["rules"]:
        reason = f"  ({rule['reason']})" if rule["reason"] else ""
        lines.append(f"  {rule['name']} for {rule['pattern']}{reason}")
    lines += [
        f"    changed {c['path']}: {c['old']} -> {c['new']}  by {c['rule']}"
        for c in rules["changes"]
    ]
    lines += [
        f"    left alone {k['path']}: {k['value']} (wanted {k['wanted']}), "
        f"set by {_who(k['set_by'])}"
        for k in rules["kept"]
    ]
    lines += [
        f"    option {o['key']} = {o['value']!r}  by {o['name']}  ({o['reason']})"
        for o in rules["options"]
    ]
    lines.append(f"active for it: {', '.join(rules['distributions'])}")
    if rules["candidates"]:
        named = ", ".join(f"{kind} {name}" for kind, name in rules["candidates"])
        lines.append(f"only with --use: {named}")
    if data["replicated"]:
        lines += ["", "parameters without logical axes, whole on every device:"]
        lines += [f"  {path}" for path in data["replicated"]]
    return "\n".join(lines)


def _who(event: Mapping[str, Any]) -> str:
    named = Event(event["kind"], event["name"])
    # A flag was set on the command line; what carried it out is code of ours.
    shown = event["location"] if event["kind"] != "flag" else None
    return f"{named} at {shown}" if shown else str(named)
