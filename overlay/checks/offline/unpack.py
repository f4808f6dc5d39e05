"""Makes a bundle's packages importable; the standard library alone, on the machine of the checks.

``unpack.py WHEELS DEPS`` unpacks each wheel unless the machine has that distribution already: what
is there stays in use. ``unpack.py --head HEAD FOLDER`` prints the receipt's head with the folder
that the receipt goes to.
"""

import json
import sys
import zipfile
from importlib import metadata
from pathlib import Path


def unpack(wheels: Path, folder: Path) -> None:
    """Unpack what is missing, once."""
    for wheel in sorted(wheels.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            there = ""
        if there:
            print(f"{name} {there} is here; {version} stays packed")  # noqa: T201
        elif not list(folder.glob(f"{name}-{version}.dist-info")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)  # its hash was checked


def main() -> None:
    """Do what the arguments say."""
    if sys.argv[1] == "--head":
        head = json.loads(Path(sys.argv[2]).read_text())
        print(json.dumps({**head, "folder": sys.argv[3]}))  # noqa: T201
    else:
        unpack(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
