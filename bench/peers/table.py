"""The results as text and as JSON. All numbers were measured in this run."""

import statistics


def as_text(results) -> str:
    parts = [of_rows(results), of_ratios(results), of_notes(results)]
    return "\n\n".join(part for part in parts if part)


def as_json(results) -> dict:
    return {
        "rows": [
            {
                "name": row.name,
                "title": row.title,
                "label": row.label,
                "optimizer": row.optimizer,
                "seconds_median": statistics.median(row.seconds),
                "verdict": row.verdict,
                "rounds": row.rounds,
            }
            for row in measured(results)
        ],
        "ratios": [
            {"peer": peer.name, "ours": mine.name, "median": statistics.median(found), "rounds": found}
            for peer in peers(results)
            for mine in ours(results)
            if (found := ratios(peer, mine))
        ],
        "missing": results.missing,
        "failures": results.failures,
        "versions": results.versions,
        "commands": results.commands,
        "idle_shares": results.idle_shares,
    }


def measured(results) -> list:
    return [row for row in results.rows if row.seconds]


def ours(results) -> list:
    return [row for row in measured(results) if row.transport]


def peers(results) -> list:
    return [row for row in measured(results) if not row.transport and not row.is_control]


def ratios(peer, mine) -> list:
    """The peer's time by ours in each round: a machine that is slow for a while is slow for both."""
    if peer.optimizer != mine.optimizer:
        return []
    pairs = zip(peer.rounds, mine.rounds)
    return [theirs["seconds"] / own["seconds"] for theirs, own in pairs if theirs and own]


def of_rows(results) -> str:
    header = ["milliseconds an exchange", "median", "lowest .. highest round", "CPU worker", "CPU servers", "CPU all"]
    lines = [[*header, "MB on lo"]]
    for row in measured(results):
        times = [median_ms(row, name) for name in ("cpu_seconds_worker", "cpu_seconds_server", "cpu_seconds_all")]
        spread = f"{1e3 * min(row.seconds):.2f} .. {1e3 * max(row.seconds):.2f}"
        lines.append([f"{row.title}: {row.label}", median_ms(row, "seconds"), spread, *times, megabytes(row)])
    return aligned(lines)


def of_ratios(results) -> str:
    """The ratios of each team's fastest form, which is the one that its users would choose."""
    best = {}
    for row in peers(results):
        other = best.get(row.title)
        if other is None or statistics.median(row.seconds) < statistics.median(other.seconds):
            best[row.title] = row
    transports = list(dict.fromkeys(mine.transport for mine in ours(results)))
    if not best or not transports:
        return ""
    lines = [["peer's time by ours, same optimizer", *transports]]
    for row in best.values():
        by_transport = {mine.transport: ratio(row, mine) for mine in ours(results) if ratio(row, mine)}
        lines.append([f"{row.title}: {row.label}", *(by_transport.get(transport, "") for transport in transports)])
    return aligned(lines) + "\n(median of the rounds' ratios, lowest .. highest)"


def of_notes(results) -> str:
    notes = [f"{name}: {version}" for name, version in sorted(results.versions.items())]
    notes += [f"{name}: {command}" for name, command in sorted(results.commands.items())]
    if results.idle_shares:
        idle = sum(results.idle_shares.values())
        # gloo's threads wake now and then even without work.
        notes.append(f"while they slept, all teams together used {idle:.1%} of a processor")
    by_reason = {}
    for name, reason in results.missing.items():
        by_reason.setdefault(reason, []).append(name)
    notes += [f"not measured: {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    notes += [f"FAILED: {name}: {reason}" for name, reason in results.failures.items()]
    return "\n".join(notes)


def ratio(peer, mine) -> str:
    found = ratios(peer, mine)
    return f"{statistics.median(found):.2f} ({min(found):.2f} .. {max(found):.2f})" if found else ""


def median_ms(row, name: str) -> str:
    return f"{1e3 * statistics.median(summary[name] for summary in row.rounds if summary):.2f}"


def megabytes(row) -> str:
    found = [summary["loopback_bytes"] for summary in row.rounds if summary and "loopback_bytes" in summary]
    return f"{statistics.median(found) / 1e6:.1f}" if found else ""


def aligned(lines: list) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = [line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        text.append("  ".join(cells).rstrip())
    text.insert(1, "-" * max(len(line) for line in text))
    return "\n".join(text)
