# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over a pair of pipes by its DevTools protocol: nothing but Python."""
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time


class BrowserError(Exception):
    pass


class Chromium:
    """One page of a browser that can reach no network, in a profile of its own."""

    def __init__(self, program):
        self._profile = tempfile.mkdtemp(prefix="vha-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def at_its_places():  # the protocol's pipes are descriptors 3 and 4
            commands, answers = os.dup(to_browser), os.dup(from_browser)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        arguments = [
            "--headless", "--remote-debugging-pipe", f"--user-data-dir={self._profile}",
            "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--proxy-server=127.0.0.1:9", "--host-resolver-rules=MAP * ~NOTFOUND",
        ]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")
        self._log = open(os.path.join(self._profile, "log"), "w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [program, *arguments, "about:blank"], stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=self._log, close_fds=False, preexec_fn=at_its_places)
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._read, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        self._buffer, self._id, self._session = b"", 0, None
        self.events = []
        try:
            targets = self.call("Target.getTargets")["targetInfos"]
            page = next(target for target in targets if target["type"] == "page")
            self._session = self.call("Target.attachToTarget", targetId=page["targetId"],
                                      flatten=True)["sessionId"]
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._log.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method, seconds=60, **parameters):
        """The answer to a command; what happens meanwhile is appended to `events`."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + seconds
        while True:
            answer = self._receive(until, method)
            if answer.get("id") != self._id:
                self.events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']['message']}")
            else:
                return answer["result"]

    def wait_for(self, event, seconds=60):
        """Returns once `event` is among the events, which keep it."""
        until = time.monotonic() + seconds
        while not any(known.get("method") == event for known in self.events):
            self.events.append(self._receive(until, event))

    def evaluate(self, expression):
        """The value of a JavaScript expression in the page, awaited where it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def _receive(self, until, what):
        while b"\0" not in self._buffer:
            if not self._selector.select(max(0.0, until - time.monotonic())):
                raise BrowserError(f"no answer to {what} in time\n{self._last_words()}")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise BrowserError(f"the browser ended before {what}\n{self._last_words()}")
            self._buffer += piece
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _last_words(self):
        self._log.seek(0)
        return self._log.read()[-2000:]
