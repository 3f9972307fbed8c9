"""Profiles a CSV file in one pass: what a column holds, how much of it is missing, its range.

Memory does not grow with the file: rows are read in batches of a bounded number of cells, and a batch is turned
into columns that are judged as a whole, by C code of the standard library where possible. A Python-level loop over
single cells would take minutes for a million rows inside a component.

Knows nothing of jobs, so that it runs under any CPython for its tests.
"""

import codecs
import csv
# Used by name only: a codec is otherwise imported when a file is first opened with it, and in a component that is
# too late, for the standard library stayed behind on the machine that built it.
import encodings.utf_8_sig
import io
import math
import re
from datetime import date, datetime
from functools import partial
from itertools import islice

# What people write where a value is missing. Compared exactly: "na" may be a country.
MISSING = frozenset({"", "NA", "N/A", "NULL", "null", "NaN", "nan", "None"})

MAX_COLUMNS = 2_000
MAX_FIELD_CHARS = 131_072
MAX_LINE_CHARS = 524_288
READ_BYTES = 65_536
# A batch ends with whichever comes first. Rows are taken a few at a time in between, since any of them may be large.
CELLS_PER_BATCH = 32_768
BYTES_PER_BATCH = 2 << 20
ROWS_PER_STEP = 32

# Possessive, so that a column of a batch is matched without remembering a way back for each line. Leading zeros
# make a text: turned into numbers, postcodes and article numbers would lose them.
INTEGERS = re.compile(r"(?:[+-]?(?:0|[1-9][0-9]{0,17})\n)*+")
NUMBERS = re.compile(r"(?:[+-]?(?:0|[1-9][0-9]*+)?(?:(?<=[0-9])\.[0-9]*+|\.[0-9]++)?(?<=[0-9.])(?:[eE][+-]?[0-9]++)?\n)*+")
DATES = re.compile(r"(?:[0-9]{4}-[0-9]{2}-[0-9]{2}\n)*+")
BOOLEANS = frozenset({"true", "false", "True", "False", "TRUE", "FALSE"})


class Malformed(Exception):
    """The file is not what it should be; reading it again would not help. `line` counts from 1."""

    def __init__(self, line, reason):
        super().__init__(f"line {line}: {reason}")
        self.line = line


class Column:
    """What is known so far. `kind` only ever moves towards `text`, and a text column costs almost nothing."""

    __slots__ = ("name", "kind", "missing", "present", "low", "high", "total")

    def __init__(self, name):
        self.name = name
        self.kind = "empty"
        self.missing = 0
        self.present = 0
        self.low = self.high = None
        self.total = 0

    def add(self, cells):
        if not MISSING.isdisjoint(cells):
            present = [cell for cell in cells if cell not in MISSING]
            self.missing += len(cells) - len(present)
            cells = present
            if not cells:
                return
        self.present += len(cells)
        if self.kind == "text":
            return
        kind, values = classify(cells, self.kind)
        if {self.kind, kind} == {"integer", "number"}:
            kind = "number"
        elif self.kind not in ("empty", kind):
            kind = "text"
        self.kind = kind
        if kind == "integer":
            self.total += sum(values)
        elif kind == "number":
            self.total += total_of(values)
        elif kind != "date":
            # A range of words says little, and one of date-times with different offsets would be wrong.
            self.low = self.high = None
            return
        low, high = min(values), max(values)
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)

    def report(self):
        out = {"name": self.name, "type": self.kind, "missing": self.missing}
        if self.low is not None:
            out["min"], out["max"] = self.low, self.high
        if self.kind in ("integer", "number"):
            mean = self.total / self.present
            # The sum of numbers near the largest float is infinite, which JSON has no word for.
            out["mean"] = mean if math.isfinite(mean) else None
        return out


def total_of(values):
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def classify(cells, before):
    """The kind of these cells and their values. `before` is the column's kind so far: what cannot be is not tried."""
    # A cell that contains a line break looks like two here; the conversion then refuses it.
    joined = "\n".join(cells) + "\n"
    if before in ("empty", "integer", "number"):
        try:
            if INTEGERS.fullmatch(joined):
                return "integer", list(map(int, cells))
            if NUMBERS.fullmatch(joined):
                values = list(map(float, cells))
                if math.isfinite(min(values)) and math.isfinite(max(values)):
                    return "number", values
        except ValueError:
            pass
    if before in ("empty", "date", "datetime"):
        try:
            if DATES.fullmatch(joined):
                for cell in set(cells):
                    date.fromisoformat(cell)
                return "date", cells
            if joined[0].isdigit() and min(map(len, cells)) >= 16:
                # Called for its refusal only.
                list(map(datetime.fromisoformat, cells))
                return "datetime", cells
        except ValueError:
            pass
    if before in ("empty", "boolean") and BOOLEANS.issuperset(cells):
        return "boolean", cells
    return "text", cells


def profile(open_file, size, delimiter=",", progress=lambda done, total: None):
    """`open_file()` gives the file in binary mode from its start; it is called a second time only to find a bad byte.

    `progress` is called after each batch; what it raises ends the run. Raises Malformed, or OSError from reading.
    """
    csv.field_size_limit(MAX_FIELD_CHARS)
    with open_file() as raw:
        buffered = io.BufferedReader(raw, READ_BYTES)
        # No translation of line ends: the CSV reader knows all three kinds, and those within quotes are data.
        text = io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="strict", newline="")
        text._CHUNK_SIZE = READ_BYTES
        # With a bound on each line: an interpreter that runs out of memory in the middle of one does not always live
        # to say so. The pieces of a line that is cut have too few fields for the header, or one that is too long.
        lines = iter(partial(text.readline, MAX_LINE_CHARS), "")
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            return _profile(reader, raw, size, progress)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise Malformed(line_of_bad_byte(open_file), f"byte 0x{byte:02x} is not UTF-8") from None


def _profile(reader, raw, size, progress):
    header, line = _header(reader)
    width = len(header)
    columns = [Column(name) for name in header]
    batch_rows = max(1, CELLS_PER_BATCH // width)
    rows_seen = 0
    while True:
        rows = []
        problem = None
        batch_end = raw.tell() + BYTES_PER_BATCH
        try:
            while len(rows) < batch_rows and raw.tell() <= batch_end:
                before = len(rows)
                # Unlike list(), extend() leaves the rows before a malformed one, and they tell its line.
                rows.extend(islice(reader, ROWS_PER_STEP))
                if len(rows) == before:
                    break
        except csv.Error as error:
            problem = error
        got = len(rows)
        if set(map(len, rows)) - {width}:
            rows, line = _without_blank_lines(rows, width, line)
        else:
            line += _lines_of(rows)
        if problem is not None:
            raise Malformed(line + 1, _reason(problem))
        if not got:
            break
        # Without rows (a batch of blank lines) there is nothing to turn into columns.
        for column, cells in zip(columns, zip(*rows)):
            column.add(cells)
        rows_seen += len(rows)
        progress(raw.tell(), size)
    return {"rows": rows_seen, "columns": [column.report() for column in columns]}


def _header(reader):
    try:
        for row in reader:
            if row:
                if len(row) > MAX_COLUMNS:
                    raise Malformed(1, f"{len(row)} columns, more than {MAX_COLUMNS}")
                return row, reader.line_num
    except csv.Error as error:
        raise Malformed(1, _reason(error)) from None
    raise Malformed(1, "the file is empty")


def _reason(error):
    text = str(error)
    if "unexpected end of data" in text:
        return "a quoted field begins here and does not end"
    if "field larger than" in text:
        return f"a field has more than {MAX_FIELD_CHARS} characters (a quote that is not closed?)"
    return text


def _lines_of(rows):
    """How many lines of the file these rows take: one each, and one more for each line break within quotes."""
    lines = len(rows)
    for row in rows:
        joined = "".join(row)
        if "\n" in joined or "\r" in joined:
            lines += sum(_line_breaks(field) for field in row)
    return lines


def _line_breaks(text):
    return text.count("\n") + text.count("\r") - text.count("\r\n")


def _without_blank_lines(rows, width, line):
    kept = []
    for row in rows:
        if row and len(row) != width:
            if sum(map(len, row)) + len(row) >= MAX_LINE_CHARS:
                raise Malformed(line + 1, f"more than {MAX_LINE_CHARS} characters (are the lines ended?)")
            raise Malformed(line + 1, f"{len(row)} fields where the header has {width}")
        if row:
            kept.append(row)
        line += _lines_of([row])
    return kept, line


def line_of_bad_byte(open_file):
    """Reads again from the start, since the decoder runs far ahead of the rows."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    line = 1
    last = b""
    with open_file() as raw:
        while True:
            chunk = raw.read(READ_BYTES)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # `object` begins with what the decoder held back of the chunk before: part of a character, no line end.
                before = last + error.object[: error.start]
                return line + _bytes_line_breaks(before) - _bytes_line_breaks(last)
            if not chunk:
                return line
            line += _bytes_line_breaks(last + chunk) - _bytes_line_breaks(last)
            last = chunk[-1:]


def _bytes_line_breaks(data):
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
