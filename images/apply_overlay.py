"""Lays a line's difference over upstream's installed wheels: ``apply_overlay.py FOLDER SITE``.

Runs while an image is built, by the Python of its base. FOLDER holds ``manifest.json`` and
``files`` (overlay/images/difference.py writes it), SITE is site-packages. What an installer added
to the old metadata folder, such as the rows of scripts, is carried over to the new one.
"""

import json
import shutil
import sys
from pathlib import Path

OWN = ("INSTALLER", "REQUESTED")  # files that installers add


def main(folder: Path, site: Path) -> None:
    """Delete what goes, then copy what is new."""
    files = folder / "files"
    for one in json.loads((folder / "manifest.json").read_text()):
        for name in one["gone"]:
            (site / name).unlink()
        old, new = site / one["old"], site / one["new"]
        if not old.is_dir():
            raise SystemExit(f"apply_overlay: upstream's wheel isn't installed: no {old}")
        carried = {name: (old / name).read_bytes() for name in OWN if (old / name).exists()}
        rows = installers_rows((old / "RECORD").read_text(), one)
        shutil.rmtree(old)
        for name in one["files"]:
            target = site / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(files / name, target)
            shutil.copymode(files / name, target)
        for name, data in carried.items():
            (new / name).write_bytes(data)
        with (new / "RECORD").open("a") as record:
            record.writelines(rows)


def installers_rows(record: str, one: dict) -> list:
    """Lines of the old RECORD for what an installer added: scripts, and its own files."""
    prefixes = ("../", *(f"{one['old']}/{name}," for name in OWN))
    lines = [line for line in record.splitlines(keepends=True) if line.startswith(prefixes)]
    return [line.replace(f"{one['old']}/", f"{one['new']}/", 1) for line in lines]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
