#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks a page of vha_inspect in Chromium: in narrow and wide windows, light and dark, it draws every
plot of every layer, in words too, fits the window, says nothing on the console and asks for no other
file.

check_page.py --browser chromium --folder SCREENSHOTS PAGE [--inspect PROGRAM CHECKPOINT_DIR]

Exit status: 0 all is well, 1 it is not. The screenshots are to be looked at.
"""
import argparse
import base64
import re
import subprocess
import sys
from pathlib import Path

from devtools import BrowserError, Chromium

WIDTHS = [360, 420, 1280]
SCHEMES = ["light", "dark"]
# What a page may say, and ask for, while it loads and is used: its own file.
FAULTS = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed"}
CONTRAST = {"--ink": 7, "--soft": 4.5, **{f"--s{k}": 3 for k in range(8)}}  # WCAG: text 4.5, graphics 3

# What is wrong with the plots, a list of lines.
PLOTS = r"""(() => {
  const wrong = [];
  const named = (plot) => plot.getAttribute('aria-label') || `a ${plot.localName} without aria-label`;
  for (const plot of document.querySelectorAll('figure svg, figure canvas')) {
    if (plot.getAttribute('role') !== 'img' || !plot.getAttribute('aria-label')) wrong.push(named(plot));
  }
  for (const svg of document.querySelectorAll('figure svg')) {
    const lines = [...svg.querySelectorAll('.line')];
    if (lines.length === 0 || lines.some((line) => !line.getAttribute('d'))) wrong.push(`${named(svg)}: no line`);
    if (/NaN|Infinity|undefined|null/.test(svg.outerHTML)) wrong.push(`${named(svg)}: no number`);
    const {width, height} = svg.viewBox.baseVal;
    for (const part of svg.querySelectorAll('.line, circle')) {
      const box = part.getBBox();
      if (box.x < 0 || box.y < 0 || box.x + box.width > width || box.y + box.height > height) wrong.push(`${named(svg)}: out of the frame`);
    }
  }
  for (const canvas of document.querySelectorAll('figure canvas')) {
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    const colours = new Set(new Uint32Array(data.buffer));
    if (colours.size < 2) wrong.push(`${named(canvas)}: one colour`);
    if (data.some((value, k) => k % 4 === 3 && value !== 255)) wrong.push(`${named(canvas)}: not painted all over`);
  }
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) wrong.push(`${root.scrollWidth - root.clientWidth} pixels too wide`);
  const svgs = document.querySelectorAll('figure svg').length, canvases = document.querySelectorAll('figure canvas').length;
  const drawn = `${svgs} curves, ${canvases} heat maps`;
  if (svgs * canvases === 0 || root.dataset.drawn !== drawn) wrong.push(`${drawn}, and the page says ${root.dataset.drawn}`);
  return wrong;
})()"""

# The luminance of a colour of the page's, as WCAG 2 defines it.
LUMINANCE = """((name) => {
  const context = document.createElement('canvas').getContext('2d');
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
  context.fillRect(0, 0, 1, 1);
  const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((byte) => {
    const part = byte / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
})"""


class Wrong(Exception):
    pass


def check_events(browser, page):
    for event in browser.events:
        method, parameters = event["method"], event["params"]
        if method in FAULTS:
            raise Wrong(f"{method}: {parameters}")
        if method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if url != page.as_uri() and not url.startswith("data:"):
                raise Wrong(f"the page asks for {url}")
    browser.events.clear()


def check_contrast(browser):
    for name, least in CONTRAST.items():
        dark, light = sorted(browser.evaluate(f"{LUMINANCE}('{of}')") for of in (name, "--card"))
        contrast = (light + 0.05) / (dark + 0.05)
        if contrast < least:
            raise Wrong(f"contrast of {name} is {contrast:.2f}, less than {least}")


def check_view(browser, page, width, scheme, shot):
    browser.events.clear()
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.call("Page.navigate", url=page.as_uri())
    browser.wait_for("Page.loadEventFired")
    check_events(browser, page)
    check_contrast(browser)
    layers = browser.evaluate("document.querySelectorAll('#layer option').length")
    for layer in reversed(range(layers)):
        browser.evaluate(f"""(() => {{
          const layer = document.getElementById('layer');
          layer.selectedIndex = {layer};
          layer.dispatchEvent(new Event('change'));
        }})()""")
        for wrong in browser.evaluate(PLOTS):
            raise Wrong(wrong)
    browser.evaluate("document.querySelector('details').open = true")
    # Drawn again for a window that is resized.
    browser.call("Emulation.setDeviceMetricsOverride", width=width + 40, height=900, deviceScaleFactor=1, mobile=False)
    browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    for wrong in browser.evaluate(PLOTS):
        raise Wrong(f"resized: {wrong}")
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    picture = browser.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
    shot.write_bytes(base64.b64decode(picture))
    check_events(browser, page)
    return layers, browser.evaluate("document.documentElement.dataset.drawn")


def check_page(program, page, folder):
    address = re.search(r"https?:|src=|@import|url\(", page.read_text(encoding="utf-8"))
    if address:
        raise Wrong(f"{address[0]} in the page")
    with Chromium(program) as browser:
        for domain in ["Page", "Runtime", "Log", "Network"]:
            browser.call(f"{domain}.enable")
        for width in WIDTHS:
            for scheme in SCHEMES:
                shot = folder / f"{page.stem}-{width}-{scheme}.png"
                try:
                    layers, drawn = check_view(browser, page, width, scheme, shot)
                except Wrong as wrong:
                    raise Wrong(f"at {width} pixels, {scheme}: {wrong}") from None
                print(f"{shot}: {layers} layers, {drawn}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--browser", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for the screenshots")
    parser.add_argument("--inspect", nargs=2, metavar=("PROGRAM", "CHECKPOINT_DIR"), help="makes the page first")
    parser.add_argument("page", type=Path)
    arguments = parser.parse_args()
    folder, page = arguments.folder.resolve(), arguments.page.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.inspect:
        program, checkpoint = arguments.inspect
        subprocess.run([program, checkpoint, "--html", page], check=True, stdout=subprocess.DEVNULL)
    try:
        check_page(arguments.browser, page, folder)
    except (Wrong, BrowserError) as error:
        print(f"{page}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
