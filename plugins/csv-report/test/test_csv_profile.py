"""Runs under any CPython from 3.11: python test/test_csv_profile.py"""

import io
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "src"))
from csv_profile import Malformed, profile  # noqa: E402 (the path comes first)


class Raw(io.BytesIO):
    """Like a file opened unbuffered."""

    def readinto(self, buffer):
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def run(data, delimiter=","):
    if isinstance(data, str):
        data = data.encode()
    return profile(lambda: Raw(data), len(data), delimiter)


def malformed(data, line, says):
    try:
        result = run(data)
    except Malformed as error:
        assert error.line == line and says in str(error), f"{data[:40]!r}: {error}"
    else:
        raise AssertionError(f"{data[:40]!r} passed: {result}")


def column(*cells):
    return run("x,y\n" + "".join(f"{cell},1\n" for cell in cells))["columns"][0]


def test_types():
    assert column("1", "-2", "+30") == {"name": "x", "type": "integer", "missing": 0, "min": -2, "max": 30, "mean": 29 / 3}
    got = column("1", "2.5", "", "1e3", ".5", "5.", "NA")
    assert (got["type"], got["missing"], got["min"], got["max"]) == ("number", 2, 0.5, 1000.0), got
    assert abs(got["mean"] - 1009 / 5) < 1e-9
    assert column("true", "False")["type"] == "boolean"
    assert column("2024-02-29", "2023-12-31") == {
        "name": "x", "type": "date", "missing": 0, "min": "2023-12-31", "max": "2024-02-29"}
    assert column("2024-02-29T10:00:00", "2024-03-01 11:00:00+01:00")["type"] == "datetime"
    assert column("", "NULL") == {"name": "x", "type": "empty", "missing": 2}
    for words in (["007"], ["1_000"], ["inf"], ["1 2"], ["2023-02-29"], ["1", "a"], ["."], ["+"], ["1e"], ["e5"],
                  ["true", "1"], ["2024-01-01", "5"], ["\u0661\u0662"], ["1e999"], ['"1\n2"'], [" 1"], ["-"]):
        got = column(*words)
        assert got["type"] == "text" and "min" not in got and "mean" not in got, (words, got)
    assert column("123456789012345678901")["type"] == "number"
    assert column("0", "-0", "0.0")["type"] == "number"
    huge = column("1.7e308", "1.7e308")
    assert huge["type"] in ("number", "text") and huge.get("mean") is None


def test_a_column_that_turns_late():
    rows = ["1"] * 40_000
    assert column(*rows, "2.5")["type"] == "number"
    late = column(*rows, "word", *rows)
    assert late == {"name": "x", "type": "text", "missing": 0}


def test_line_ends_bom_and_quotes():
    plain = run("a,b\n1,x\n2,y\n")
    assert plain == {"rows": 2, "columns": [
        {"name": "a", "type": "integer", "missing": 0, "min": 1, "max": 2, "mean": 1.5},
        {"name": "b", "type": "text", "missing": 0}]}
    for other in ("a,b\r\n1,x\r\n2,y\r\n", "a,b\r1,x\r2,y\r", "\ufeffa,b\n1,x\n2,y", '"a",b\n1,"x"\n\n2,y\n\n'):
        assert run(other) == plain, other
    assert run('\ufeff"a;b";b\n1;"x\r\n""y"""\n', ";")["columns"][0]["name"] == "a;b"
    assert run("a,b\n")["rows"] == 0
    assert run("a,b\n" + "\n" * 50_000 + "1,x\n")["rows"] == 1, "a batch of nothing but blank lines"


def test_malformed_files_name_the_line():
    malformed("", 1, "empty")
    malformed("\ufeff", 1, "empty")
    malformed("\n\r\n", 1, "empty")
    malformed("a,b\n1,2\n3\n", 3, "1 fields where the header has 2")
    malformed('a,b\n"x\r\ny\nz",2\n\n1,2,3\n', 6, "3 fields")
    malformed('a,b\r1,2\r"x"y,3\r', 3, "expected")
    malformed('a,b\n1,2\n"x,3\n4,5\n', 3, "does not end")
    malformed('"a,b\n1,2\n', 1, "does not end")
    malformed("a,b\n1," + "x" * 200_000 + "\n", 2, "more than")
    malformed(",".join("x" * 3000) + "\n", 1, "columns")
    malformed("a,b\n" + ",x" * 400_000 + "\n", 2, "are the lines ended")
    malformed("a,b," * 400_000, 1, "columns")
    malformed("a" * 1_000_000, 1, "more than")
    malformed(b"a,b\n1,2\n3,\xff\n", 3, "0xff is not UTF-8")
    malformed("a,b\n".encode("utf-16"), 1, "not UTF-8")
    # Cut in the middle of a character at the very end.
    malformed(b"a,b\n1,\xc3", 2, "not UTF-8")
    # Beyond several read chunks and batches, with each kind of line end.
    for end in ("\n", "\r\n", "\r"):
        good = (f"a,b{end}" + f"12345,word{end}" * 100_000).encode()
        malformed(good + b"1,\xe9\xe9" + end.encode(), 100_002, "not UTF-8")
        malformed(good + f"1{end}".encode(), 100_002, "1 fields")
        malformed(good + f'1,"x{end}'.encode() * 2, 100_002, "")


def test_large_fields_are_read_in_small_batches():
    row = ("x" * 100_000 + "\n").encode()
    seen = []
    data = b"a\n" + row * 200
    result = profile(lambda: Raw(data), len(data), ",", lambda done, total: seen.append(done))
    assert result == {"rows": 200, "columns": [{"name": "a", "type": "text", "missing": 0}]}
    assert len(seen) >= 4, seen
    # A quoted field may be longer than what is read as one line at a time, if it has line breaks.
    quoted = 'a,b\n"' + "word\n" * 20_000 + '",1\n2\n'
    malformed(quoted, 20_003, "1 fields")


def test_progress_grows_to_the_size():
    data = b"a,b\n" + b"1,2\n" * 200_000
    seen = []
    profile(lambda: Raw(data), len(data), ",", lambda done, total: seen.append((done, total)))
    assert len(seen) > 5 and seen == sorted(seen) and seen[-1] == (len(data), len(data))


def timing(rows):
    """python test/test_csv_profile.py --time 1000000"""
    data = b"id,day,price,qty,customer,note\n" + b"".join(
        b"%d,2024-%02d-%02d,%d.%02d,%d,customer %d,%s\n"
        % (i, i % 12 + 1, i % 28 + 1, i % 500, i % 100, i % 9, i % 5000, b"" if i % 3 else b'"a, b"')
        for i in range(rows))
    start = time.perf_counter()
    result = run(data)
    print(f"{rows} rows, {len(data)} bytes: {time.perf_counter() - start:.2f} s", [c["type"] for c in result["columns"]])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--time"]:
        timing(int(sys.argv[2]))
    else:
        for name, test in list(globals().items()):
            if name.startswith("test_"):
                test()
        print("csv-report: all passed")
