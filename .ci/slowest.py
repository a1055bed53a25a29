"""Prints the 20 slowest tests of the JUnit reports in a folder: `python .ci/slowest.py FOLDER`."""

import sys
from pathlib import Path
from xml.etree import ElementTree

cases = [case.attrib for path in Path(sys.argv[1]).rglob("*.xml") for case in ElementTree.parse(path).iter("testcase")]
seconds = sorted(((float(case["time"]), f"{case['classname']}::{case['name']}") for case in cases), reverse=True)
print(f"{len(seconds)} tests, {sum(s for s, _ in seconds):.0f} s; the slowest:")
for took, name in seconds[:20]:
    print(f"{took:8.1f} s  {name}")
