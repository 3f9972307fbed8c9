"""The component: turns an attempt into a call of `csv_profile`, and what that raises into failures.

Reads one file below /in, the folder that the manifest asks for. All imports stand here at the top, because a
component carries only the modules that were imported while it was built.
"""

import io
import json
import os
import stat

from componentize_py_types import Err
import wit_world
from wit_world.imports import cancellation, log
from wit_world.imports import progress as progress_reports
from wit_world.imports.types import Failure_Permanent, Failure_Retryable

from csv_profile import Malformed, profile

FOLDER = "/in"


class Stopped(Exception):
    pass


class WitWorld(wit_world.WitWorld):
    def handle(self, attempt):
        file, delimiter = read_payload(attempt.payload)
        path = f"{FOLDER}/{file}"
        try:
            info = os.stat(path)
            if not stat.S_ISREG(info.st_mode):
                raise permanent(f"{path} is not a regular file")
            report = profile(lambda: io.FileIO(path), info.st_size, delimiter, Progress())
        except Malformed as error:
            raise permanent(f"{file}, {error}") from None
        except Stopped:
            raise Err(Failure_Retryable("stopped on request")) from None
        except (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError) as error:
            raise permanent(f"failed to read {path}: {error.strerror}") from None
        except OSError as error:
            raise Err(Failure_Retryable(f"failed to read {path}: {error}")) from None
        except MemoryError:
            raise permanent(f"{file} needs more memory than this plugin may have: are its lines ended?") from None

        progress_reports.report("bytes", 100.0)
        log.write(log.Level.INFO, "profiled", [("file", file), ("rows", str(report["rows"]))])
        result = {"file": file, "bytes": info.st_size, **report}
        return json.dumps(result, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Progress:
    """Reports each full percent once, and looks whether the attempt should stop."""

    def __init__(self):
        self.percent = -1

    def __call__(self, done, total):
        if cancellation.cancelled():
            raise Stopped
        percent = min(99, done * 100 // max(total, 1))
        if percent > self.percent:
            self.percent = percent
            progress_reports.report("bytes", float(percent))


def permanent(message):
    return Err(Failure_Permanent(message))


def read_payload(text):
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise permanent(f"failed to read the payload: {error}") from None
    if not isinstance(payload, dict):
        raise permanent("the payload is not an object")
    file = payload.get("file")
    # The host refuses a path that leaves the folder anyway. Checked here too, so that the failure names the field.
    if not isinstance(file, str) or not is_inside(file):
        raise permanent(f"file must be a path below the folder in, without empty parts, . or ..: {repr(file)[:200]}")
    delimiter = payload.get("delimiter", ",")
    if delimiter not in (",", ";", "\t", "|"):
        raise permanent(f"delimiter must be a comma, semicolon, tab or bar: {repr(delimiter)[:80]}")
    return file, delimiter


def is_inside(path):
    if "\\" in path or "\0" in path or not path.isprintable():
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))
