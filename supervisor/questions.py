"""The six capability questions about a model on a machine, each answered with its evidence.

Nothing is inferred from a name: what only the engine can tell was asked of it, and is unknown
until then. Pure over what was found out.
"""

from __future__ import annotations

from modeld.shared.capabilities import Capability
from modeld.shared.capacity import LayerKind, MachineReading, ModelFacts, Resolution
from modeld.shared.ir_embedding import embeds
from modeld.supervisor.evidence import BuildEvidence

NOT_ASKED = "the engine has not been asked about this file yet"


def answers(
    facts: ModelFacts,
    known: BuildEvidence,
    plan: Resolution,
    machine: MachineReading | None,
    quality: Capability,
    *,
    resident: bool,
    device_words: str = "",
) -> list[Capability]:
    """``machine`` None: the plan is an open session's own. ``device_words``: why the device that
    the settings name can't be used.
    """
    return [
        _metadata(facts),
        _loader(facts, known, resident),
        _task(facts, known, resident),
        _device(plan, machine, resident, device_words),
        _memory(plan, machine),
        quality,
    ]


def _metadata(facts: ModelFacts) -> Capability:
    layers = sum(run.count for run in facts.layers)
    kinds = sorted({run.kind.value for run in facts.layers})
    missing = []
    if not layers:
        missing.append("its layers")
    if not facts.model_max:
        missing.append("its context ceiling")
    if facts.unknown_pattern:
        missing.append("which layers have the window that it declares")
    if any(run.kind is LayerKind.WINDOW for run in facts.layers) and facts.window_pattern_source:
        kinds.append(f"window pattern from {facts.window_pattern_source}")
    text = f"{facts.architecture}, {layers} layers ({', '.join(kinds)}), from the file's header"
    if missing:
        text += f"; it doesn't tell {' or '.join(missing)}"
    return Capability("metadata_parsed", "yes" if layers else "unknown", text)


def _loader(facts: ModelFacts, known: BuildEvidence, resident: bool) -> Capability:
    name = "loader_supports_architecture"
    if resident:
        return Capability(name, "yes", "loaded by the linked engine")
    if known.loader == "yes":
        how = "took the file's shape in a dry run"
        if facts.model_type == "openvino":
            how = "loaded and ran it in a trial"
        return Capability(name, "yes", f"{known.backend_version} {how}")
    if known.loader == "no":
        return Capability(name, "no", f"{known.backend_version} refused it: {known.words}")
    return Capability(name, "unknown", known.words or NOT_ASKED)


def _task(facts: ModelFacts, known: BuildEvidence, resident: bool) -> Capability:
    name = "pipeline_supports_task"
    if embeds(facts):
        said = "embed: loaded for it" if resident else f"embed: {known.words or NOT_ASKED}"
        return Capability(name, "yes" if resident else "unknown", said)
    task = "vision" if facts.vision else "generate"
    if resident:
        return Capability(name, "yes", f"{task}: loaded for it")
    if known.loader == "no":
        return Capability(name, "no", f"{task}: the engine doesn't load it")
    if known.loader != "yes":
        return Capability(name, "unknown", f"{task}: {known.words or NOT_ASKED}")
    if known.generates:
        return Capability(name, "no", f"{task}: {known.generates}")
    return Capability(name, "yes", f"{task}: the engine's own report of the file")


def _device(
    plan: Resolution, machine: MachineReading | None, resident: bool, words: str
) -> Capability:
    name = "device_supports_it"
    used = [row for row in plan.devices if row.engine_name and row.layers > 0]
    where = ", ".join(f"{row.engine_name} ({row.name})" for row in used) or "the host's processor"
    if machine is not None and machine.source != "live":
        return Capability(
            name, "unknown", f"{where}: planned from {machine.source}, no engine there was asked"
        )
    if resident:
        return Capability(name, "yes", f"{where}: it runs there")
    if words:
        return Capability(name, "no", f"the setting openvino_device names one that fails: {words}")
    if not used:
        idle = [d.name for d in machine.devices if not d.engine_name] if machine else []
        if idle:
            where += f"; the linked engine can't use {', '.join(idle)}"
        return Capability(name, "yes", where)
    return Capability(name, "unknown", f"{where}: listed by the engine; tried when it loads")


def _memory(plan: Resolution, machine: MachineReading | None) -> Capability:
    name = "memory_fits"
    if plan.refusal is not None:
        numbers = dict(plan.refusal.numbers)
        short = int(numbers.get("short_bytes") or 0)
        if not short:  # it is no matter of memory, or of more than one place's
            return Capability(name, "no", plan.refusal.message)
        return Capability(
            name,
            "no",
            f"{numbers['needed_bytes']} bytes are needed for {numbers['window']} tokens, "
            f"{short} more than there are; the refusal has the whole sum",
        )
    if machine is not None and not machine.host.known:
        return Capability(name, "unknown", "the host's memory can't be read")
    tokens = plan.numbers.effective.tokens
    how = "planned from live memory" if machine is not None else "an open session has it"
    if machine is not None and machine.source != "live":
        how = f"planned from {machine.source}"
    return Capability(name, "yes", f"{tokens} tokens; {how}")
