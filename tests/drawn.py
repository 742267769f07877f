"""One record of the calls drawn on a GPU: python tests/drawn.py FOLDER_OR_FILE...

Takes the files that test_contract.py wrote into $CUFLASH_DRAWN (or an earlier record of this kind): of each
build the newest whose kernels are as they are now, else the newest.  In kernels/measured/drawn-<device>.json:

builds: name of a build -> calls, judged (row -> results of it that were right; a call with lengths runs with
        lengths on the host, then on the device), date, device, sources (row -> hash of its text then), stale
        (rows that have changed since)
calls, judged: sums over the builds.  missing: builds of the list without a run.
"""

import sys
from collections import Counter
from pathlib import Path

from cuflash import records


def parts(path):
    """The single builds of a file or of all files of a folder."""
    path = Path(path)
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        record = records.read(file)
        if record.get("kind") != "drawn":
            continue
        if "builds" in record:
            yield from record["builds"].values()
            continue
        where = record["environment"]
        kept = {name: record[name] for name in ("build", "calls", "judged", "sources")}
        yield kept | {"date": where["date"], "device": where["device"]["name"]}


def best(found):
    """Build -> the part to keep of it."""
    chosen = {}
    for part in found:
        part = part | {"stale": records.stale(part)}
        before = chosen.get(part["build"])
        if before is None or (not part["stale"], part["date"]) > (not before["stale"], before["date"]):
            chosen[part["build"]] = part
    return dict(sorted(chosen.items()))


def main(paths):
    from test_contract import builds

    found = best(part for path in paths for part in parts(path))
    judged = sum((Counter(part["judged"]) for part in found.values()), Counter())
    payload = {
        "calls": sum(part["calls"] for part in found.values()),
        "judged": dict(sorted(judged.items())),
        "missing": [build.id for build in builds() if build.id not in found],
        "builds": found,
    }
    device = next(iter(found.values()))["device"]
    file = records.folder() / f"drawn-{records.slug(device)}.json"
    records.write("drawn", payload, rows=judged, path=file)
    changed = [name for name, part in found.items() if part["stale"]]
    print(f"{file}: {payload['calls']} calls of {len(found)} builds.")
    print(f"Missing: {payload['missing']}.  Kernels changed since: {changed}.")


if __name__ == "__main__":
    main(sys.argv[1:])
