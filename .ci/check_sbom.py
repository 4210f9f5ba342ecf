"""Whether the bills of materials in a wheel keep to CycloneDX's schema: `check_sbom.py WHEEL`."""

from __future__ import annotations

import sys
import zipfile

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

with zipfile.ZipFile(sys.argv[1]) as wheel:
    boms = [name for name in wheel.namelist() if ".dist-info/sboms/" in name]
    if not boms:
        raise SystemExit("the wheel has no bill of materials")
    for name in boms:
        error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(wheel.read(name).decode())
        if error:
            raise SystemExit(f"{name}: {error}")
        print(f"{name} is valid")
