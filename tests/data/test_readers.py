"""Files of every kind, whole and broken."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data import files
from llmtrain.data.readers import read_file

DOCUMENTS = ["话说天下大势，\n分久必合。", 'quote " comma , \u2028 and 😀', "third"]


def texts(path: Path, **options: str) -> list[str]:
    documents = [""]
    for text, ends in read_file(path, **options):
        documents[-1] += text
        if ends:
            documents.append("")
    assert documents.pop() == ""
    return documents


def write(path: Path, data: bytes | str) -> Path:
    data = data.encode() if isinstance(data, str) else data
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def content(kind: str, tmp_path: Path, field: str = "text") -> bytes:
    records = [{"id": number, field: text} for number, text in enumerate(DOCUMENTS)]
    if kind == "jsonl":
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    if kind == "json":
        return json.dumps(records, ensure_ascii=False, indent=2).encode()
    file = tmp_path / f"made.{kind}"
    if kind == "csv":
        with file.open("w", newline="", encoding="utf-8") as opened:
            writer = csv.DictWriter(opened, ["id", field])
            writer.writeheader()
            writer.writerows(records)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file, row_group_size=2)
    return file.read_bytes()


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_records(kind: str, packed: str, tmp_path: Path) -> None:
    file = write(tmp_path / f"a.{kind}{packed}", content(kind, tmp_path, "正文"))
    assert texts(file, text_field="正文") == DOCUMENTS
    with pytest.raises(
        ValueError, match=rf"a\.{kind}.*: no (field|column) 'text' \(there is: id, 正文\): set data\.text_field"
    ):
        texts(file)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.TXT", "a.txt.gz", "a.md.GZ"])
def test_plain_text_is_one_document(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    data = "\ufeff第一\r\n\r\n二 \r三\n".encode()
    file.write_bytes(gzip.compress(data) if name.lower().endswith(".gz") else data)
    assert texts(file) == ["第一\n\n二 \n三\n"]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv"])
def test_blocks_do_not_matter(block: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = "好\r\n\r\n😀x\n".encode() if kind == "txt" else content(kind, tmp_path)
    file = write(tmp_path / f"a.{kind}", data)
    whole = texts(file)
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    assert texts(file) == whole


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv"])
def test_what_is_not_utf8_is_named_with_its_offset(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b'{"text": "' if kind.startswith("json") else b"text\r\n"
    line = 1 if kind.startswith("json") else 2
    file = write(tmp_path / f"a.{kind}", data + b"x" * 100 + "好".encode() + "好".encode("gb18030") + b'"}')
    for block in (1, 10, 1 << 20):
        monkeypatch.setattr(files, "BLOCK_BYTES", block)
        with pytest.raises(
            ValueError, match=rf"a\.{kind} is not UTF-8: byte 0xba at offset {len(data) + 103}, line {line}; say what"
        ):
            texts(file)


def test_a_character_cut_off_at_the_end(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"ab\xe5\xa5")
    with pytest.raises(ValueError, match="byte 0xe5 at offset 2"):
        texts(file)


def test_another_encoding(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "分久必合\r\n".encode("gb18030"))
    assert texts(file, encoding="gb18030") == ["分久必合\n"]
    with pytest.raises(ValueError, match=r"data\.encoding=klingon is unknown"):
        texts(file, encoding="klingon")
    with pytest.raises(ValueError, match=r"data\.encoding=hex is unknown"):  # a codec, but not of text
        texts(file, encoding="hex")


def test_json_lines_may_be_strings_and_blank(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl", '"one"\n\n  \n{"text": "two"}\n{"text": null}\n{"text": " "}\n"\\ud83d\\ude00\\ud83d"'
    )
    assert texts(file) == ["one", "two", "😀\ufffd"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{broken", r"a\.jsonl, line 2: not JSON \("),
        ('{"body": "x"}', r"a\.jsonl, line 2: no field 'text' \(there is: body\): set data\.text_field"),
        ("{}", r"line 2: no field 'text' \(there is: none\)"),
        ("{broken", r"\): mend it or take it out, or name the file \.txt if it is plain text"),
        ('{"text": 3}', r"line 2: 'text' holds a number, not text: choose another data\.text_field, or mend it"),
        ('{"text": {}}', r"line 2: 'text' holds an object, not text"),
        ("[1]", r'line 2: found a list, expected \{"text": "…"\} or a text in quotes: mend it or take it out'),
        ("1.5", r"line 2: found a number, expected"),
        ("true", r"line 2: found true or false, expected"),
        ("[" * 100_000, r"line 2: not JSON"),
    ],
)
def test_a_bad_line_is_named(line: str, sentence: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=sentence):
        texts(file)


@settings(max_examples=100)
@given(
    values=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(str.strip), max_size=6),
    array=st.booleans(),
    indent=st.sampled_from([None, 0, 3]),
    block=st.integers(1, 40),
)
def test_json_streams(
    values: list[str], array: bool, indent: int | None, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An array, or values one after another; the blocks that a file is read in do not show."""
    objects = [{"text": value, "n": [1, {"a": -0.5}]} for value in values]
    whole = json.dumps(objects, indent=indent) if array else "\n".join(json.dumps(o, indent=indent) for o in objects)
    file = write(tmp_path_factory.mktemp("json") / "a.json", whole)
    expected = [value.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff") for value in values]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", block)
        assert texts(file) == [text for text in expected if text.strip()]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ('[{"text": "a"}, {"text": ', r"a\.json, element 2: not JSON \("),
        ('["a"', r"a\.json, element 1: not JSON \(the array is not closed, line 1\)"),
        ('["a", {"n": 1}]', r"a\.json, element 2: no field 'text'"),
        ('["a", [2]]', r"a\.json, element 2: found a list, expected"),
        ('["a" "b"]', r"a\.json, element 1: not JSON \(found '\"' behind it, not a comma or \], line 1\)"),
        ('["a",]', r"a\.json, element 2: not JSON"),
        ('["a"]\n["LOST"]', r"a\.json, line 2: not JSON \(found '\[' behind the end of the array\): mend the file"),
        ("[]\n\nx", r"a\.json, line 3: not JSON \(found 'x' behind the end of the array\)"),
        ('{"text": "a"}\n\n{"text": \n oops}', r"a\.json, line 3: not JSON \(Expecting value, line 4\): mend the file"),
        ("nonsense", r"a\.json, line 1: not JSON"),
    ],
)
def test_bad_json_is_named(data: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.json", data)
    for block in (1 << 20, 1, 5):
        monkeypatch.setattr(files, "BLOCK_BYTES", block)
        with pytest.raises(ValueError, match=sentence):
            texts(file)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_white_space_around_an_array_is_nothing(name: str, tmp_path: Path) -> None:
    assert texts(write(tmp_path / name, '\ufeff \r\n[ "a" ,\n"b"\n] \n\n')) == ["a", "b"]
    assert texts(write(tmp_path / name, " [ ] ")) == []


def test_csv_fields_may_be_long_and_hold_lines(tmp_path: Path) -> None:
    long = "长\n" * 200_000
    file = tmp_path / "a.csv"
    with file.open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened).writerows([["text", "n"], [long, "1"], ["", "2"], ["short", "3"]])
    assert texts(file) == [long, "short"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            'id,text\n1,one\n\n2,"two\n3,LOST\n',
            r"a\.csv, line 4: the row that begins there is not CSV \(unexpected end",
        ),
        ('id,text\n1,"one"more\n', r"a\.csv, line 2: the row that begins there is not CSV \(',' expected after"),
        (
            "id,text\n1,one, LOST\n",
            r"a\.csv, line 2: 3 fields under a header of 2: put fields with commas .* in quotes",
        ),
        ('id,text\n1,"one\nmore"\n2\n', r"a\.csv, line 4: 1 fields under a header of 2"),
        ("text,id,text\n1,2,3\n", r"a\.csv has 2 columns 'text': rename all but one"),
        ("\n", r"a\.csv: no column 'text' \(there is: none\)"),
    ],
)
def test_bad_csv_is_named_with_the_line_where_its_row_begins(data: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        texts(write(tmp_path / "a.csv", data))


def test_parquet_holds_text_and_nothing_else(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", None, "b"], "n": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["a", "b"]
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: 'n' holds a number, not text"):
        texts(tmp_path / "a.parquet", text_field="n")
    with pytest.raises(ValueError, match=r"b\.parquet is not a parquet file that can be read \(.*write or fetch it"):
        texts(write(tmp_path / "b.parquet", b"PAR1 nothing"))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"no gzip", lambda data: data[:20] + b"\x00" * 9]
)
def test_damaged_gzip_is_named(damage, tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(damage(gzip.compress(b"text " * 100 + bytes(range(100)))))
    with pytest.raises(ValueError, match=r"a\.txt\.gz is not a whole gzip file"):
        texts(tmp_path / "a.txt.gz")


def test_an_unknown_extension_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.docx has the unknown extension '\.docx': use \.txt \.md \.jsonl"):
        texts(write(tmp_path / "a.docx", "x"))
    with pytest.raises(ValueError, match=r"gone\.txt cannot be read: No such file"):
        texts(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match=r"gone\.parquet cannot be read: No such file"):
        texts(tmp_path / "gone.parquet")
