"""Opens pages of runs in Chromium and says what is wrong with them; not part of the test suite.

    python -m tests.tools.train.check_in_browser runs/lm_cpu_mesh/report.html

Checks, in a wide and a narrow window, light and dark: nothing on the console, nothing loaded,
nothing wider than the window, every plot drawn. Leaves pictures to be looked at. Exit code 77 where
there is no Chromium.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--allow-file-access-from-files", "--enable-logging=stderr",
]  # fmt: skip
_NO_CHROMIUM = 77
_WIDTHS = (1280, 400)
# Measures a page in a frame as wide as the window to be checked.
_PROBE = """<!DOCTYPE html><title>probe</title>
<iframe id="page" src="{url}" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="found"></pre>
<script>
addEventListener("load", () => {{
  const frame = document.getElementById("page").contentWindow, page = frame.document;
  // Of a plot that is there twice, for wide and for narrow windows, one is hidden.
  const shown = [...page.querySelectorAll("svg")].filter(s => s.getClientRects().length);
  const plots = shown.map(s => s.getBoundingClientRect());
  document.getElementById("found").textContent = JSON.stringify({{
    scrollWidth: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    plots: plots.length,
    flat: plots.filter(r => r.width < 100 || r.height < 50).length,
    loaded: frame.performance.getEntriesByType("resource").map(e => e.name),
  }});
}});
</script>
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--screenshots", type=Path, help="folder for a PNG of each view")
    arguments = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, _NAMES)), None)
    if chromium is None:
        print(f"none of {', '.join(_NAMES)} is here")
        return _NO_CHROMIUM
    problems = []
    with tempfile.TemporaryDirectory() as scratch:
        for page in arguments.pages:
            for width in _WIDTHS:
                found = _probe(chromium, Path(scratch), page, width)
                print(f"{page} at {width} px: {found}")
                problems += [f"{page} at {width} px: {x}" for x in _problems(found, width)]
                if arguments.screenshots:
                    for scheme in ("light", "dark"):
                        target = arguments.screenshots / f"{page.parent.name}_{width}_{scheme}.png"
                        size = f"--window-size={width},{found['height']}"
                        dark = ["--force-dark-mode"] if scheme == "dark" else []
                        flags = [size, f"--screenshot={target}", *dark]
                        _run(chromium, Path(scratch), page.resolve().as_uri(), *flags)
    print("\n".join(problems) or "nothing wrong")
    return 1 if problems else 0


def _probe(chromium, scratch, page, width):
    probe = scratch / "probe.html"
    probe.write_text(_PROBE.format(url=page.resolve().as_uri(), width=width))
    done = _run(
        chromium, scratch, probe.as_uri(), f"--window-size={width + 50},1000", "--dump-dom",
        "--virtual-time-budget=5000",
    )  # fmt: skip
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1])
    found["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return found


def _problems(found, width):
    if found["console"]:
        yield f"on the console: {found['console']}"
    if found["loaded"]:
        yield f"loads {found['loaded']}"
    if found["scrollWidth"] > width:
        yield f"is {found['scrollWidth']} px wide"
    if found["flat"]:
        yield f"{found['flat']} of {found['plots']} plots are not drawn"


def _run(chromium, scratch, url, *flags):
    command = [chromium, *_QUIET, f"--user-data-dir={scratch / 'profile'}", *flags, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


if __name__ == "__main__":
    sys.exit(main())
